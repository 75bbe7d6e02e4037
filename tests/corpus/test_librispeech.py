import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asr.corpus import open_corpus
from asr.corpus.librispeech import download_librispeech
from tests.conftest import write_librispeech


class Server(ThreadingHTTPServer):
    """Serves `files`, or parts of them, and counts the bytes of archives that it has sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.sent = 0
        self.failures = 0  # how many requests will fail
        self.broken = ""  # the suffix of files that break off in the middle
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    parts = True

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.files[self.path])))
        self.end_headers()

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        if self.server.failures:
            self.server.failures -= 1
            return self.send_error(503) if self.server.failures % 2 else self.connection.close()
        if content is None:
            return self.send_error(404)
        wanted = self.headers.get("Range") if self.parts else None
        first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        first, content = int(first), content[: int(last) + 1] if last else content
        if first >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            return self.end_headers()
        self.send_response(206)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if self.path.endswith(".gz"):
            self.server.sent += len(content) - first  # counted before the client has everything and looks
        broken = self.server.broken and self.path.endswith(self.server.broken)
        self.wfile.write(content[first : len(content) // 2 if broken else None])

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def server(tmp_path) -> Server:
    write_librispeech(tmp_path / "origin" / "LibriSpeech" / "dev-clean-2", utterances=4)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(tmp_path / "origin" / "LibriSpeech", "LibriSpeech")
    server = Server()
    server.files["/31/dev-clean-2.tar.gz"] = archive.getvalue()
    server.files["/31/md5sum.txt"] = f"{hashlib.md5(archive.getvalue()).hexdigest()}  dev-clean-2.tar.gz\n".encode()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_part_is_fetched_unpacked_and_then_left_alone(server, tmp_path):
    place = download_librispeech("dev-clean-2", tmp_path / "data", server.url)
    assert place == tmp_path / "data" / "LibriSpeech" / "dev-clean-2"
    assert len(open_corpus([str(place)])) == 4
    sent = server.sent
    assert download_librispeech("dev-clean-2", tmp_path / "data", server.url) == place
    assert server.sent == sent
    assert not list((tmp_path / "data").glob("*.gz"))


def test_a_download_that_broke_off_goes_on_where_it_stopped(server, tmp_path):
    whole = server.files["/31/dev-clean-2.tar.gz"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dev-clean-2.tar.gz").write_bytes(whole[:1000])
    place = download_librispeech("dev-clean-2", tmp_path / "data", server.url)
    assert server.sent == len(whole) - 1000
    assert len(open_corpus([str(place)])) == 4


def test_a_download_that_the_server_ends_early_goes_on_too(server, tmp_path):
    for server.broken in (".txt", ".gz"):
        with pytest.raises(ValueError, match="the same command continues where it stopped"):
            download_librispeech("dev-clean-2", tmp_path, server.url)
    size = len(server.files["/31/dev-clean-2.tar.gz"])
    assert (tmp_path / "dev-clean-2.tar.gz").stat().st_size == size // 2
    server.broken, server.sent = "", 0
    assert len(open_corpus([str(download_librispeech("dev-clean-2", tmp_path, server.url))])) == 4
    assert server.sent == size - size // 2


@pytest.mark.parametrize("published", [True, False])
def test_what_was_there_before_stays(server, tmp_path, published):
    """A folder unpacked by hand is not touched; a complete archive is neither fetched nor deleted."""
    if not published:
        del server.files["/31/md5sum.txt"]
    whole = server.files["/31/dev-clean-2.tar.gz"]
    archive, place = tmp_path / "dev-clean-2.tar.gz", tmp_path / "LibriSpeech" / "dev-clean-2"
    archive.write_bytes(whole)
    assert download_librispeech("dev-clean-2", tmp_path, server.url) == place
    assert len(open_corpus([str(place)])) == 4
    (place / "alignments.txt").touch()
    download_librispeech("dev-clean-2", tmp_path, server.url)
    assert archive.read_bytes() == whole and (place / "alignments.txt").exists() and not server.sent


def test_an_archive_that_cannot_be_unpacked_is_deleted(server, tmp_path):
    del server.files["/31/md5sum.txt"]
    for junk in (b"junk", server.files["/31/dev-clean-2.tar.gz"][:-100]):
        server.files["/31/dev-clean-2.tar.gz"] = junk
        with pytest.raises(ValueError, match="deleted"):
            download_librispeech("dev-clean-2", tmp_path / "data", server.url)
        assert not (tmp_path / "data" / "LibriSpeech").exists() and not list((tmp_path / "data").glob("*.gz"))


def test_an_archive_that_is_not_what_was_published_is_deleted(server, tmp_path):
    server.files["/31/md5sum.txt"] = b"0123456789abcdef  dev-clean-2.tar.gz\n"
    with pytest.raises(ValueError, match="MD5"):
        download_librispeech("dev-clean-2", tmp_path / "data", server.url)
    assert not list((tmp_path / "data").rglob("*.*"))


def test_without_published_sums_it_says_that_nothing_is_checked(server, tmp_path, caplog):
    del server.files["/31/md5sum.txt"]
    place = download_librispeech("dev-clean-2", tmp_path / "data", server.url)
    assert "not checked" in caplog.text
    assert len(open_corpus([str(place)])) == 4


def test_an_unknown_part_and_a_server_that_is_not_there(server, tmp_path):
    with pytest.raises(ValueError, match="train-clean-100"):
        download_librispeech("train", tmp_path, server.url)
    with pytest.raises(ValueError, match="continues where it stopped"):
        download_librispeech("dev-clean", tmp_path, server.url)
    with pytest.raises(ValueError, match="continues where it stopped"):
        download_librispeech("dev-clean", Path(tmp_path), "http://127.0.0.1:9")
