"""The page of `asr.inspect`, as text and in a real browser."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import torch

from asr import inspect, plots
from asr.resources import resource
from tests.test_commands import call
from tests.test_plots import observation  # noqa: F401 (a fixture)

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# does what a user does and reports what is then visible; it is added to the page before the browser reads it
PROBE = """<script>
const errors = [];
window.addEventListener("error", event => errors.push(event.message));
window.addEventListener("load", () => {
  const images = [...document.images];
  const shown = section => [...section.querySelectorAll("img")].filter(image => image.offsetHeight > 0)
    .map(image => [Number(image.dataset.layer), Number(image.dataset.head)]);
  const seen = [...document.querySelectorAll("section[data-layers]")].map(section => {
    const first = shown(section), choices = [];
    const [layer, head] = section.querySelectorAll("select");
    for (const [l, h] of [["1", "2"], ["2", "4"]]) {
      layer.value = l; layer.dispatchEvent(new Event("change"));
      head.value = h; head.dispatchEvent(new Event("change"));
      choices.push(shown(section));
    }
    return {first, choices};
  });
  const broken = images.filter(image => !image.complete || !image.naturalWidth).length;
  document.title = JSON.stringify({errors, images: images.length, broken, seen});
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "page.html"
    done = call("asr.inspect", resource("data", "samples", "corner.flac"), "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{out}: a man with a black dog was standing at the corner\n"
    return out


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert "http" not in re.sub(r'src="data:[^"]*"', "", text)
    assert text.count("<img ") == 4 + 3 * 4 + 12 * 4  # plus one for every layer and head of the decoder and the encoder
    assert "a man with a black dog was standing at the corner" in text


@pytest.mark.skipif(not BROWSER, reason="no Chromium here (Debian: apt-get install chromium)")
def test_in_a_browser_all_pictures_are_there_and_layer_and_head_can_be_chosen(page, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("<style>", PROBE + "<style>", 1))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", probed.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    found = json.loads(re.search("<title>(.*?)</title>", dom)[1])
    assert found["errors"] == [] and found["broken"] == 0
    assert found["images"] == 4 + 3 * 4 + 12 * 4
    cross, own = found["seen"]
    assert cross["first"] == [[3, 1]] and own["first"] == [[12, 1]]  # the last layers
    for section in (cross, own):
        assert section["choices"] == [[[1, 2]], [[2, 4]]]


def test_every_head_has_its_own_picture_under_its_own_title(observation):  # noqa: F811
    def drawn(image: str) -> tuple[str, str]:
        svg = base64.b64decode(re.search('base64,([^"]*)', image)[1]).decode()
        return re.search('xlink:href="(data:image/png[^"]*)"', svg)[1], re.search(">([^<]*layer[^<]*)</text>", svg)[1]

    varied = replace(observation, self_attention=torch.rand(3, 2, 12, 12).softmax(dim=-1))
    pictures = list(inspect._images(partial(plots.self_attention, varied), varied.self_attention))
    alone = [inspect._image(plots.self_attention(varied, layer, head)) for layer in (1, 2, 3) for head in (1, 2)]
    assert [drawn(picture) for picture in pictures] == [drawn(picture) for picture in alone]
    assert len({drawn(picture) for picture in pictures}) == 6


def test_every_script_is_drawn(observation, recwarn):  # noqa: F811
    written = replace(observation, tokens=["你", "好", "<eos>"])
    image = inspect._image(plots.cross_attention(written, layer=1, head=1))
    drawn = base64.b64decode(re.search('base64,([^"]*)', image)[1]).decode()
    assert ">你</text>" in drawn and ">好</text>" in drawn
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_a_later_piece_has_its_times_in_the_recording(observation, monkeypatch):  # noqa: F811
    monkeypatch.setattr(inspect, "_image", lambda figure: "")
    monkeypatch.setattr(inspect, "_images", lambda draw, weights: ())
    page = inspect.page(observation, "calls/<one>.wav", 20.0)
    assert "<h1>&lt;one&gt;.wav</h1>\n<p>20.00 to 20.50 s; 2 tokens out; 2 heads in 2 encoder layers, 2 in 1" in page


def test_bad_input_is_one_line(files, capsys):
    (files / "notes.txt").write_text("words\n")
    model, out = ("--model", files / "model"), ("--out", files / "page.html")
    wrong = {
        "nowhere.wav: no such file": (1, "nowhere.wav", *model, *out),
        "this is text, not audio": (1, files / "notes.txt", *model, *out),
        "there is no piece 2": (1, files / "a.wav", *model, *out, "--piece", "2"),
        "a.wav would overwrite what is read": (2, files / "a.wav", *model, "--out", files / "a.wav"),
        "--piece must be at least 1": (2, files / "a.wav", *model, *out, "--piece", "0"),
    }
    for message, (code, *arguments) in wrong.items():
        with pytest.raises(SystemExit) as ended:
            inspect.main([str(argument) for argument in arguments])
        assert ended.value.code == code
        assert re.fullmatch(rf"asr\.inspect: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert not (files / "page.html").exists()


def test_a_silent_recording_has_a_page_too(files, tmp_path):
    import numpy as np
    import soundfile

    soundfile.write(tmp_path / "silence.wav", np.zeros(16000), 16000)
    done = call("asr.inspect", tmp_path / "silence.wav", "--model", files / "model", "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "nothing was heard" in (tmp_path / "page.html").read_text()
