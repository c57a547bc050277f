import hashlib
import http.server
import os
import threading
import time

import pytest

from sparring.data import download
from sparring.data.download import Unavailable, from_npm, from_url

CONTENT = b"payload" * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/silent":
            time.sleep(1)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[:100])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.mark.parametrize("progress", [False, True])
def test_url(server, tmp_path, progress):
    path = from_url(server + "/whole", tmp_path / "a", timeout=5, progress=progress, md5=MD5)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "message"), [("/missing", "Not Found"), ("/short", "100 of 7000"), ("/silent", "timed out")]
)
def test_url_that_fails(server, tmp_path, path, message):
    with pytest.raises(Unavailable, match=message):
        from_url(server + path, tmp_path / "a", timeout=0.3, progress=False)


def test_url_with_a_wrong_sum_or_no_server(server, tmp_path):
    with pytest.raises(Unavailable, match="md5"):
        from_url(server + "/whole", tmp_path / "a", timeout=5, progress=False, md5="0" * 32)
    with pytest.raises(Unavailable, match="refused"):
        from_url("http://127.0.0.1:1/a", tmp_path / "a", timeout=1, progress=False)


def fake_npm(tmp_path, monkeypatch, body):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "content").write_bytes(CONTENT)
    work = tmp_path / "work"
    work.mkdir()
    return work


def test_npm(tmp_path, monkeypatch):
    work = fake_npm(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args; cp {tmp_path}/content pkg-1.0.tgz')
    path = from_npm("pkg@1.0", work, size=len(CONTENT), sha256=SHA256, progress=True)
    assert path == work / "pkg-1.0.tgz" and path.read_bytes() == CONTENT
    assert (tmp_path / "args").read_text().startswith("pack pkg@1.0 --silent --ignore-scripts")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "status 1: npm error code E404"),
        ("exit 0", "left 0 archives"),
        ("echo half > pkg.tgz", "sha256"),
    ],
)
def test_npm_that_fails(tmp_path, monkeypatch, body, message):
    work = fake_npm(tmp_path, monkeypatch, body)
    with pytest.raises(Unavailable, match=message):
        from_npm("pkg@1.0", work, size=10, sha256=SHA256, progress=False)


def test_npm_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="npm client is not installed"):
        from_npm("pkg@1.0", tmp_path, size=10, sha256=SHA256, progress=False)


def test_ctrl_c_ends_the_client(tmp_path, monkeypatch):
    work = fake_npm(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 30")

    def interrupted(folder):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(download, "_size", interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_npm("pkg@1.0", work, size=10, sha256=SHA256, progress=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
