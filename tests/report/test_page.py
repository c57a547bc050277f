"""The page: complete, self-contained, true to its numbers, and safe with any text."""

import base64
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image

from sparring.errors import UserError
from sparring.report import AttackPath, Frame, Method, charts, write_page
from sparring.report.content import Drawing, Exhibit, Picture
from sparring.report.method_charts import drawings
from sparring.report.page import brief, chance, percent, png, table, tables, unbroken

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Collects tags and text, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def history(level):
    return [
        {"epoch": e, "natural": level, "pgd10": level / 2, "backprops": 10 * level, "loss": 1.0, "tau": None}
        for e in (1, 2, 3)
    ]


METHODS = [
    Method("Standard", "no defence", {"Natural": 0.9912, "FGSM": 0.0512, "PGD-20": 0.0}, 0.0, 8.25, history(0.9)),
    Method("Madry", "worst case", {"Natural": 0.9578, "FGSM": 0.7811, "PGD-20": 0.5733}, 10.0, 22.04, history(0.7)),
    Method(
        "FAT",
        "stops as it fools the model",
        {"Natural": 0.9822, "FGSM": 0.7844, "PGD-20": 0.5511, "C&W": 0.5711},
        6.53,
        1234.5,
        history(0.8),
    ),
]
FACTS = {"Images": "450 test images", "Command": "sparring demo --seed 0", "Hardware": "x86_64 CPU, 1 thread"}


def make_path(tau=1, crossed=3, stopped=4, steps=10):
    rng = np.random.default_rng(0)
    frames = tuple(
        Frame(k, rng.random((8, 8), dtype=np.float32), "3" if k < crossed else "8", k < crossed, 0.955 - 0.09 * k)
        for k in range(steps + 1)
    )
    return AttackPath("3", tau, frames, stopped, 8 / 255, 0.003)


def write(folder, **changes):
    given = {"title": "A title", "lead": "A lead.", "methods": METHODS, "strips": [make_path()], "facts": FACTS}
    write_page(folder / "page.html", **(given | changes))
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page"), note="Over five seeds: 98.0 to 98.4 %.")


def test_the_page_is_self_contained(page):
    for tag, attributes in Reader(page).tags:
        assert tag not in {"script", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "xlink:href", "srcset", "poster", "data"):
            address = attributes.get(name) or ""
            assert tag == "a" or address == "" or address.startswith(("data:", "#")), (tag, address)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page


def test_the_structure_of_the_page(page):
    reader = Reader(page)
    tags = [tag for tag, _ in reader.tags]
    assert page.startswith("<!doctype html>")
    assert ("html", {"lang": "en"}) in reader.tags
    assert tags.count("h1") == 1 and tags.count("main") == 1 and tags.count("h2") == 4
    assert len(reader.ids) == len(set(reader.ids))
    assert all("alt" in attributes for tag, attributes in reader.tags if tag == "img")
    drawn = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawn) == 5 and all(attributes["aria-label"] for attributes in drawn)
    labelled = {attributes["aria-labelledby"] for _, attributes in reader.tags if "aria-labelledby" in attributes}
    assert labelled <= set(reader.ids)


def test_the_page_shows_everything_it_was_given(page):
    text = Reader(page).text.replace("\u00a0", " ")
    for method in METHODS:
        assert method.name in text and method.about in text
        for name, accuracy in method.accuracies.items():
            assert name in text and percent(accuracy) in text
        assert brief(method.backprops) in text and brief(method.seconds) in text
    for name, value in FACTS.items():
        assert name in text and value in text
    assert "A title" in text and "A lead." in text and "Over five seeds: 98.0 to 98.4 %." in text
    for frame in make_path().frames:
        assert chance(frame.confidence).replace("\u00a0", " ") in text


def test_the_order_of_the_sections(page):
    places = [page.index(mark) for mark in ("<h1", 'class="results"', 'class="strip"', 'class="drawings"', "<dl>")]
    assert places == sorted(places)


def test_the_best_of_each_column_is_marked():
    best = {
        (method.name, cell.column)
        for method, row in zip(METHODS, table(METHODS), strict=True)
        for cell in row
        if cell.best
    }
    # C&W was measured for one method only, so none is best. BPs: among methods that train against an attack. No
    # time is best: seconds depend on what else ran on the machine.
    assert best == {("Standard", "Natural"), ("FAT", "FGSM"), ("Madry", "PGD-20"), ("FAT", "Mean BPs")}


def test_costs_are_compared_for_the_same_task_only():
    tasks = {"a": (9.0, "digits"), "b": (5.0, "digits"), "c": (1.0, "shapes"), "d": (7.0, "faces"), "e": (6.0, "faces")}
    methods = [Method(name, "", {}, cost, cost, [], task=task) for name, (cost, task) in tasks.items()]
    best = {method.name for method, (backprops, _) in zip(methods, table(methods), strict=True) if backprops.best}
    assert best == {"b", "e"}


def test_numbers_that_print_alike_are_equally_good():
    pair = [Method(name, "", {"Natural": value}, 1.0, 1.0, []) for name, value in (("a", 0.90001), ("b", 0.90002))]
    assert all(natural.best and backprops.best for natural, backprops, _ in table(pair))


def test_every_way_of_measuring_has_its_own_table():
    a, b = ([Method(name, "", {"Natural": 0.5}, 1.0, 1.0, [], way) for way in ("dat", "mart")] for name in "ab")
    assert tables([*a, *b]) == [[a[0], b[0]], [a[1], b[1]]]
    assert tables(a) == [a] and tables([a[0], b[0]]) == [[a[0], b[0]]] and tables([]) == []


def test_too_many_columns_are_split_by_the_way_of_measuring(tmp_path):
    ways = {"protocol one": [f"attack {i}" for i in range(5)], "protocol two": [f"attack {i}" for i in range(4, 9)]}
    methods = [
        Method(name, "", dict.fromkeys(columns, value), 1.0, 1.0, [], way)
        for name, value in (("a", 0.5), ("b", 0.6))
        for way, columns in ways.items()
    ]
    assert len(tables(methods[:2])) == 2  # of one run
    page = write(tmp_path, methods=methods, strips=[])
    found = re.findall(r"<table.*?</table>", page, flags=re.DOTALL)
    assert len(found) == 2 and ' many"' not in page  # a table on a desktop, not a grid
    for part, (way, columns) in zip(found, ways.items(), strict=True):
        assert part.count(way) == 1 and f"<caption>{way}</caption>" in part
        assert re.findall(r'<th scope="col" class="number">(.*?)</th>', part)[:-2] == columns
        assert part.count("★") == 5 + 2  # every accuracy of b; both for BPs


def test_captions_give_the_number_of_validation_images(tmp_path):
    methods = [replace(method, held_out=count) for method, count in zip(METHODS, (120, 120, 1000), strict=True)]
    assert "Images as they are (n = 120):" in Reader(write(tmp_path, methods=methods[:2])).text
    assert "Images as they are (n = 120 or 1,000):" in Reader(write(tmp_path, methods=methods)).text
    assert "Images as they are:" in Reader(write(tmp_path)).text


def test_attack_names_stay_on_one_line_and_text_is_escaped():
    text = unbroken("PGD-20-0 & <PGD-10> at 5 %")
    whole = '<span class="whole">PGD-{}</span>'
    assert text == f"{whole.format('20-0')} &amp; &lt;{whole.format(10)}&gt; at 5\u00a0%"


def test_a_missing_number_is_labelled(page):
    assert page.count('aria-label="not measured"') == 2


@pytest.mark.parametrize(
    ("path", "caption"),
    [
        (make_path(), "changes to “8” at step 3. PGD-10 continues: after step 10 the true class has probability 6 %."),
        (make_path(), "PGD-10-1 stops at step 4, at 60 %."),
        (make_path(tau=0, stopped=3), "PGD-10-0 stops at step 3, at 68 %."),
        (make_path(tau=10, stopped=10), "PGD-10-10 takes all 10 steps too."),
        (make_path(crossed=0, tau=0, stopped=0), "The model is wrong before the first step."),
        (
            make_path(crossed=99, stopped=10),
            "never fools the model: after step 10 the true class still has probability 6 %.",
        ),
    ],
)
def test_a_strips_caption_describes_the_attack(tmp_path, path, caption):
    page = write(tmp_path, methods=[], strips=[path])
    assert caption in Reader(page).text.replace("\u00a0", " ")
    # Both rows: every frame of PGD, and those of the friendly attack.
    assert page.count('<li class="frame') == 11 + path.stopped_at + 1
    assert page.count('<li class="rest') == (path.stopped_at < 10)
    assert page.count(f"{10 - path.stopped_at} step") >= (path.stopped_at < 10)


def test_without_strips_and_histories_their_sections_are_left_out(tmp_path):
    bare = [Method("One", "alone", {"Natural": 0.5}, 0.0, 1.0, [])]
    page = write(tmp_path, methods=bare, strips=[])
    assert "Why" not in page and "<svg" not in page and "50.0" in page
    Reader(page)


def test_the_strips_name_their_model_or_say_why_there_are_none(tmp_path):
    page = Reader(write(tmp_path, strips_note="The model is that of FAT."))
    assert "with steps of 0.003 within eps 8/255. The model is that of FAT." in page.text
    page = write(tmp_path, strips=[], strips_note="No attack is shown: PGD fools no model.")
    places = [page.index(mark) for mark in ("Results</h2>", 'id="why"', "No attack is shown: ", "Training curves")]
    assert places == sorted(places) and page.count("No attack is shown: ") == 1
    assert 'class="strip"' not in page


def test_a_note_is_shown_without_a_table(tmp_path):
    assert "Left out: x." in Reader(write(tmp_path, methods=[], note="Left out: x.")).text


def test_all_text_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>\'&'
    methods = [Method(evil, evil, {evil: 0.5, "Natural": 0.4, "PGD-20": 0.3}, 1.0, 1.0, history(0.5)) for _ in range(2)]
    frames = tuple(Frame(k, np.zeros((2, 2), np.float32), evil, True, 0.5) for k in range(3))
    path = AttackPath(evil, 0, frames, 2, 0.3, 0.03)
    page = write(
        tmp_path,
        title=evil,
        lead=evil,
        methods=methods,
        strips=[path],
        facts={evil: evil, "Command": evil},
        note=evil,
    )
    reader = Reader(page)
    assert "script" not in [tag for tag, _ in reader.tags]
    assert reader.text.count(evil) >= 8


def test_pictures_keep_their_pixels():
    image = np.array([[0.0, 1.0], [0.2, 0.4]], dtype=np.float32)
    address = png(image)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))))
    assert shown.shape == (96, 96)
    assert np.array_equal(shown[::48, ::48], [[0, 255], [51, 102]])
    colour = png(np.full((120, 110, 3), 0.5, dtype=np.float32))
    assert Image.open(io.BytesIO(base64.b64decode(colour.split(",")[1]))).size == (110, 120)


def test_probabilities_never_read_0_or_100():
    assert [chance(p).replace("\u00a0", " ") for p in (0.0, 1e-9, 0.014, 0.5, 0.99, 0.9999, 1.0)] == [
        "<1 %",
        "<1 %",
        "1 %",
        "50 %",
        "99 %",
        ">99 %",
        ">99 %",
    ]


def test_equal_input_gives_equal_bytes(tmp_path):
    assert write(tmp_path) == write(tmp_path)


def test_a_folder_that_does_not_exist_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "missing")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PDFTOTEXT = shutil.which("pdftotext")


def printed(folder, **given):
    """The text of each printed page."""
    write(folder, **given)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}",
        "--no-pdf-header-footer", f"--print-to-pdf={folder / 'page.pdf'}", (folder / "page.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    done = subprocess.run([PDFTOTEXT, folder / "page.pdf", "-"], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\f").split("\f")


@pytest.mark.skipif(not (CHROMIUM and PDFTOTEXT), reason="no Chromium or no pdftotext (apt-get install poppler-utils)")
def test_in_print_headings_figures_and_captions_stay_together(tmp_path):
    groups = [
        Drawing(
            Markup(charts.curves({"a": ([1, 2], [1.0, 2.0])}, name=f"n{i}", title="t", alt="a")),
            f"begin{i}. {'More words. ' * (7 * i % 60)} end{i}.",
            f"Group{i}.",
        )
        for i in range(14)
    ]
    tall = io.BytesIO()
    Image.new("L", (900, 1400), 128).save(tall, format="PNG")
    exhibits = [
        Exhibit("one", "Figure 1", "Many groups", "see", drawings=groups),
        Exhibit("two", "Figure 2", "Short", "see", notes=["First note.", "Last note."]),
        Exhibit("three", "Figure 3", "Next", "see", pictures=[Picture(tall.getvalue(), "alt", "Tall caption.")]),
    ]
    pages = printed(tmp_path, methods=[], strips=[], exhibits=exhibits)
    for i in range(14):
        words = (f"Group{i}.", f"begin{i}.", f"end{i}.")
        (pages_of,) = {tuple(number for number, page in enumerate(pages) if word in page) for word in words}
        assert len(pages_of) == 1
    (short,) = [page for page in pages if "Figure 2 of the paper" in page]
    assert "Last note." in short
    (after,) = [page for page in pages if "Figure 3 of the paper" in page]
    assert "Tall caption." in after and after is not short


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it with: apt-get install -y chromium")
def test_a_browser_renders_the_page_without_errors(tmp_path):
    write(tmp_path)
    picture = tmp_path / "page.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars",
        "--enable-logging=stderr", "--window-size=1100,2400", f"--screenshot={picture}",
        (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert pixels.shape == (2400, 1100)
    assert (pixels[200:2200] < 100).mean() > 0.01  # something is drawn


def test_curves_of_other_data_or_another_radius_have_their_own_drawing():
    def method(name, images, at):
        return replace(METHODS[1], name=name, images=images, validated_at=at)

    _, robust, *_ = alike = drawings([method("a", "digits", "eps 0.3"), method("b", "digits", "eps 0.3")])
    assert len(alike) == 5  # natural, PGD-10, BPs, loss and the trade-off
    assert robust.caption.startswith("The same images under attack, eps 0.3.")
    mixed = drawings(
        [method("a", "digits", "eps 0.3"), method("b", "digits", "eps 0.2"), method("c", "cifar10", "eps 0.3")]
    )
    starts = [drawing.caption.partition(": ")[0] for drawing in mixed[:5]]
    assert starts == ["digits", "cifar10", "digits, eps 0.3", "digits, eps 0.2", "cifar10, eps 0.3"]
    assert mixed[0].caption.endswith("Last epoch: a 70.0 %, b 70.0 %.")
    assert 'aria-label="digits, eps 0.2: Accuracy under PGD-10' in mixed[3].svg
    ids = re.findall(r'id="([^"]+)"', "".join(drawing.svg for drawing in mixed))
    assert len(ids) == len(set(ids))
    alone = drawings([method("b", "digits", "eps 0.2")])[1].svg
    assert styles(mixed[3].svg) != styles(alone)  # b keeps its style from the other drawings
    unknown = drawings([method("a", "digits", "eps 0.3"), METHODS[2]])
    assert [drawing.caption[:6] for drawing in unknown[:2]] == ["digits", "Images"]


def styles(svg):
    """The dashes and colours of the lines."""
    return re.findall(r"stroke-dasharray: [^;]*|stroke: #\w+", svg)


def test_trade_offs_against_autoattack_and_pgd20():
    both = {"Natural": 0.8, "PGD-20": 0.5, "AutoAttack": 0.45}
    methods = [replace(METHODS[1], name=name, accuracies=both) for name in "ab"]
    *_, first, second = drawings([*methods, replace(METHODS[1], name="c", accuracies={"Natural": 0.7, "PGD-20": 0.3})])
    assert "AutoAttack on test images (%) against natural: a 80.0 and 45.0; b 80.0 and 45.0." in first.svg
    assert "PGD-20 on test images (%) against natural: a 80.0 and 50.0;" in second.svg and "c 70.0" in second.svg
