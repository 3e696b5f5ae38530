"""Downloads from a server of this machine: whole, continued, refused; and their conversion."""

import gzip
import hashlib
import io
import pickle
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.data import convert, download, fetch


class Server(ThreadingHTTPServer):
    """Serves `files`. `stop_after`: bytes after which the next connections break; `ranges`: whether it knows them."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = {}, []
        self.stop_after, self.ranges, self.status = None, True, None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        server, content = self.server, self.server.files.get(self.path[1:])
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        if content is None or server.status:
            self.send_error(server.status or 404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        if start >= len(content) and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content) if server.stop_after is None else start + server.stop_after
        self.wfile.write(content[start:stop])
        self.close_connection = True


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("INTENTION_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def serve(monkeypatch, server, place):
    """Put files for a set on the server, in place of those of the public source."""

    def put(name, contents):
        source = fetch.SOURCES[name]
        files = []
        for file, content in zip(source.files, contents, strict=True):
            server.files[file.name] = content
            files.append(
                fetch.File(file.name, (server.url + file.name,), f"sha256:{hashlib.sha256(content).hexdigest()}")
            )
        monkeypatch.setitem(fetch.SOURCES, name, replace(source, files=tuple(files)))  # type: ignore
        return files

    return put


def idx(array):
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes())


RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 256, (13, 28, 28), dtype=np.uint8)
Y = np.arange(13, dtype=np.uint8) % 10
MNIST = [idx(X), idx(Y), idx(X[:11]), idx(Y[:11])]


def test_mnist(call, serve, server, place):
    serve("mnist", MNIST)
    code, out, err = call("data", "fetch", "mnist")
    assert (code, err) == (0, "")
    assert f"mnist is ready: {place / 'mnist' / 'mnist.npz'}" in out
    assert "no longer needed" in out
    found = data.load("mnist")
    assert (found.parts["train"].x[..., 0].numpy() == X).all()
    assert found.parts["test"].y.tolist() == Y[:11].tolist()
    count = len(server.asked)
    assert call("data", "fetch", "mnist")[1].startswith("mnist was there already")
    assert len(server.asked) == count


def test_a_download_goes_on_where_it_stopped(call, serve, server, place, monkeypatch):
    monkeypatch.setattr(download, "CHUNK", 1000)  # a piece that is cut off is lost
    serve("mnist", MNIST)
    server.stop_after = 3000
    code, out, err = call("data", "fetch", "mnist")
    assert code == 1
    assert "the connection broke off" in err
    assert "The same command tries again and goes on where it stopped" in err
    part = place / "downloads" / "train-images-idx3-ubyte.gz.part"
    assert part.read_bytes() == MNIST[0][:3000]
    server.stop_after, server.asked = None, []
    code, out, _ = call("data", "fetch", "mnist")
    assert code == 0
    assert "train-images-idx3-ubyte.gz (0.0 MB), goes on after 0.0 MB" in out
    assert server.asked[0] == "bytes=3000-"
    assert not part.exists()
    assert (data.load("mnist").parts["train"].x[..., 0].numpy() == X).all()


@pytest.mark.parametrize("ranges", [True, False])
def test_what_is_there_already_is_not_trusted(serve, server, place, ranges):
    (file, *_) = serve("mnist", MNIST)
    server.ranges = ranges
    target = place / "downloads" / file.name
    target.parent.mkdir()
    part = target.with_name(f"{file.name}.part")
    # longer than the file: asked for again from the start
    part.write_bytes(bytes(len(MNIST[0]) + 5))
    assert fetch._retrieve(file, target.parent).read_bytes() == MNIST[0]
    # all of it: nothing is asked for again, where the server can say so
    target.unlink()
    part.write_bytes(MNIST[0])
    assert fetch._retrieve(file, target.parent).read_bytes() == MNIST[0]
    # the beginning of another file: refused by its hash, and not kept
    target.unlink()
    part.write_bytes(b"something else")
    if ranges:
        with pytest.raises(LabError, match="what came has not the hash sha256:"):
            fetch._retrieve(file, target.parent)
        assert not part.exists()
        assert not target.exists()
    assert fetch._retrieve(file, target.parent).read_bytes() == MNIST[0]


def test_a_file_that_was_brought_by_hand(call, serve, server, place):
    files = serve("mnist", MNIST)
    server.files = {}
    code, _, err = call("data", "fetch", "mnist")
    assert code == 1
    assert "the server answers 404 Not Found" in err
    assert f"bring {files[0].urls[0]} here" in err
    assert f"in the folder {place / 'downloads'} as {files[0].name}" in err
    (place / "downloads").mkdir(exist_ok=True)
    for file in files:
        (place / "downloads" / file.name).write_bytes(b"wrong")
    assert f"{files[0].name}: it has not the hash" in call("data", "fetch", "mnist")[2]
    for file, content in zip(files, MNIST, strict=True):
        (place / "downloads" / file.name).write_bytes(content)
    assert call("data", "fetch", "mnist")[0] == 0
    assert len(data.load("mnist").parts["train"].y) == 13


def test_without_a_network(call, serve, server, place, monkeypatch):
    (file, *others) = serve("mnist", MNIST)
    nowhere = ("http://127.0.0.1:9/one", "http://127.0.0.1:9/two")
    source = fetch.SOURCES["mnist"]
    monkeypatch.setitem(fetch.SOURCES, "mnist", replace(source, files=(replace(file, urls=nowhere), *others)))
    code, _, err = call("data", "fetch", "mnist")
    assert code == 1
    assert f"{nowhere[0]}: no connection; {nowhere[1]}: no connection" in err
    # the second of two places is asked if the first does not answer
    there = (nowhere[0], file.urls[0])
    monkeypatch.setitem(fetch.SOURCES, "mnist", replace(source, files=(replace(file, urls=there), *others)))
    assert call("data", "fetch", "mnist")[0] == 0


def test_what_cannot_be_fetched(call, place):
    assert "cannot be downloaded; can be fetched: mnist, cifar100, miniimagenet" in call("data", "fetch", "built-in")[2]
    assert "there is no such set" in call("data", "fetch", "mnits")[2]


def test_a_folder_that_cannot_be_written(serve, monkeypatch, tmp_path):
    (file, *_) = serve("mnist", MNIST)
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"cannot write to .*INTENTION_DATA chooses another folder"):
        fetch._retrieve(file, tmp_path / "file" / "downloads")


def cifar(count):
    names = "\n".join(f"name{i}" for i in range(100)).encode()
    rows = RANDOM.integers(0, 256, (count, 2 + 3072), dtype=np.uint8)
    rows[:, 1] = np.arange(count) % 100
    members = {"train.bin": rows.tobytes(), "test.bin": rows[:100].tobytes(), "fine_label_names.txt": names}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(f"cifar-100-binary/{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return rows, buffer.getvalue()


def test_cifar(serve, place):
    rows, content = cifar(200)
    serve("cifar100", [content])
    fetch.fetch("cifar100")
    train = data.load("cifar100", None).parts["train"]
    assert train.x.shape == (200, 32, 32, 3)
    for i, row, column, channel in ((0, 0, 0, 0), (7, 3, 11, 1), (199, 31, 30, 2)):
        assert train.x[i, row, column, channel] == rows[i, 2 + 1024 * channel + 32 * row + column]
    assert [train.classes[y] for y in train.y[:3]] == ["name0", "name1", "name2"]


def cache(count, protocol=2, size=84):
    images = RANDOM.integers(0, 256, (600 * count, size, size, 3), dtype=np.uint8)
    classes = {f"n{i:08}": list(range(i, len(images), count)) for i in range(count)}
    return images, classes, pickle.dumps({"image_data": images, "class_dict": classes}, protocol=protocol)


def test_miniimagenet(serve, place, monkeypatch):
    caches = [cache(1, size=30), cache(2, size=28), cache(1, protocol=4, size=28)]
    serve("miniimagenet", [content for *_, content in caches])
    path = fetch.fetch("miniimagenet")
    assert [len(list((path / part).iterdir())) for part in data.PARTS] == [1, 2, 1]
    assert not list(place.glob(".mini*"))
    from intention.lab.data.images import read_sheet, resize

    images, classes, _ = caches[1]
    for name, indices in classes.items():
        assert (read_sheet(path / "val" / f"{name}.webp").numpy() == images[indices]).all()
    small = resize(torch.from_numpy(caches[0][0]), 28)
    assert (read_sheet(path / "train" / "n00000000.webp") == small).all()


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def content(**changes):
    images = np.zeros((600, 28, 28, 3), np.uint8)
    return {"image_data": images, "class_dict": {"n00000001": list(range(600))}} | changes


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Evil(print, "run"), r"asks for \w+\.print"),
        (content(image_data=Evil(eval, "print('run')")), r"asks for \w+\.eval"),
        (content(extra=Evil(getattr, "x", "y")), r"asks for \w+\.getattr"),
        (content(image_data=np.zeros((600, 28, 28, 3), np.float32)), "has the type 'f4', not bytes"),
        (content(image_data=np.array([Evil(print, "run")], dtype=object)), "asks for|has the type 'O8'"),
        (content(image_data=np.asfortranarray(np.zeros((600, 28, 28, 3), np.uint8))), "not of bytes in C order"),
        (content(image_data=np.zeros((600, 28, 28), np.uint8)), "images have the shape"),
        (content(image_data=[1, 2]), "not a cache of miniImageNet"),
        (content(class_dict={"n1": [0, 1]}), "class n1 has not 600 images"),
        (content(class_dict={"n1": [600] * 600}), "class n1 has not 600 images"),
        (content(class_dict={"../n1": list(range(600))}), "a class is called '../n1'"),
        ([1, 2], "not a cache of miniImageNet"),
    ],
)
def test_a_pickle_is_only_read_for_plain_values(tmp_path, capsys, thing, message):
    path = tmp_path / "cache.pkl"
    for protocol in (2, 4):
        path.write_bytes(pickle.dumps(thing, protocol=protocol))
        with pytest.raises(LabError, match=message):
            convert.read_cache(path)
    assert not capsys.readouterr().out


def test_a_pickle_that_is_cut_or_none(tmp_path):
    path = tmp_path / "cache.pkl"
    whole = pickle.dumps(content(), protocol=2)
    path.write_bytes(whole)
    assert convert.read_cache(path)[0].shape == (600, 28, 28, 3)
    for bad in (whole[:-100], b"", b"no pickle", b"P0\n."):
        path.write_bytes(bad)
        with pytest.raises(LabError, match=r"cache\.pkl is not a cache of miniImageNet"):
            convert.read_cache(path)
    with pytest.raises(LabError, match="cannot read"):
        convert.read_cache(tmp_path / "none.pkl")


@pytest.mark.parametrize("make", [convert.mnist, convert.cifar100])
def test_a_download_that_is_something_else(tmp_path, make):
    file = tmp_path / "file.gz"
    for bad in (b"", b"no gzip", gzip.compress(b"no content"), gzip.compress(b"\0\0\x08\x01\0\0\0\x09abc")):
        file.write_bytes(bad)
        with pytest.raises(LabError, match=r"file\.gz is not .*delete it and fetch again"):
            make([file] * 4, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_sources_have_hashes_and_safe_addresses():
    for source in fetch.SOURCES.values():
        for file in source.files:
            kind, _, value = file.hash.partition(":")
            assert len(value) == {"sha256": 64, "md5": 32}[kind]
            assert all(url.startswith("https://") and url.endswith(file.name) for url in file.urls)


def test_the_bar_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with download._progress("file", 0, 10) as advance:
        advance(10)
    assert "downloading file (0.0 MB)" in capsys.readouterr().out
