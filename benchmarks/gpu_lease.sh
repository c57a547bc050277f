#!/usr/bin/env bash
# Half an hour on a lent GPU machine that keeps nothing between two calls but its temporary folder.
#
#   bash benchmarks/gpu_lease.sh first FOLDER...        copy the tree, and what was carried along, out of the calls' way
#   bash benchmarks/gpu_lease.sh more FOLDER...         more that was carried: data come in several calls
#   bash benchmarks/gpu_lease.sh begin END QUEUE:SLOTS...   work the queues (benchmarks/queues) in turn, in the background,
#                                                       until END seconds after the first call
#   bash benchmarks/gpu_lease.sh home UNTIL             wait until then or the end, tell how far all is, pack for home
#
# FOLDER is site (packages that are not there), cifar10 (PNG sheets) or svhn (WebP sheets), or a part of one: site,
# cifar10-1, ... What comes home has no weights. No call may come more than half a minute after the last.
set -u
here=${TMPDIR:-/tmp}/lease
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$here/bytecode PYTHONPATH=$here/tree/src:$here/site:$here/tree/benchmarks PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$here/inductor TRITON_CACHE_DIR=$here/triton SPARRING_DATA=$here/data

now() { echo $(($(date +%s) - $(cat "$here/began"))); }
say() { echo "[$(now) s] $*" >> "$here/log.txt"; }

more() {
  for folder in "$@"; do
    name=$(basename "$folder"); name=${name%%-[0-9]*}
    mkdir -p "$here/$name" && cp -r "$folder"/. "$here/$name/"
  done
}

work() { # END QUEUE:SLOTS...: in the background
  end=$1; shift
  cd "$here/tree" || exit 1
  for data in cifar10 svhn; do
    [ -d "$here/$data" ] && python3 -m sparring data fetch "$data" --source "$here/$data" > "$here/fetch-$data.txt" 2>&1
    say "$data: $(tail -n 1 "$here/fetch-$data.txt" 2> /dev/null)"
  done
  for queue in "$@"; do
    name=${queue%%:*}
    left=$(python3 -c "print(max(0.05, ($end - $(now)) / 60))")
    say "begin $queue, $left minutes left"
    python3 benchmarks/gpu_queue.py "$here/logs/$name" "benchmarks/queues/$name.txt" --slots "${queue##*:}" \
      --minutes "$left" > "$here/queue-$name.txt" 2>&1
    say "over $queue"
  done
  say finished
}

case ${1:-} in
  first)
    mkdir -p "$here/tree" "$here/logs" && date +%s > "$here/began"
    cp -r src benchmarks results "$here/tree/" && mkdir -p "$here/tree/runs"
    shift; more "$@"; say "first call" ;;
  more) shift; more "$@" ;;
  begin) shift; setsid bash "$0" work "$@" < /dev/null > "$here/errors.txt" 2>&1 & sleep 1; cat "$here/log.txt" ;;
  work) shift; work "$@" ;;
  home)
    while [ "$(now)" -lt "$2" ] && ! grep -q finished "$here/log.txt"; do sleep 1; done
    cat "$here/log.txt" "$here/errors.txt"
    cut -c1-120 "$here"/logs/*/queue.txt
    for log in "$here"/logs/*/*.txt; do echo "== ${log#"$here"/logs/}"; tail -n 12 "$log" | cut -c1-200; done | tail -n 90
    for file in "$here"/tree/runs/*/*/metrics.jsonl; do [ -e "$file" ] && echo "$(wc -l < "$file") $(tail -n 1 "$file" | cut -c1-160)"; done
    tar czf "$OUT/home.tgz" --exclude='*.safetensors' --exclude='*.npz' -C "$here" tree/results tree/runs logs log.txt
    echo "[$(now) s] packed $(du -h "$OUT/home.tgz" | cut -f1)" ;;
  *) sed -n '2,11p' "$0"; exit 2 ;;
esac
