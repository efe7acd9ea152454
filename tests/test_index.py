import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import numbered_examples, write_tfrecord

from dali_tf_input import InputError, build_index, find_files, index_files_of, read_index
from dali_tf_input.index import index_command


@pytest.fixture
def file(tmp_path):
    return write_tfrecord(tmp_path / "train-00000-of-00001", numbered_examples(9))


def test_equals_tfrecord2idx(file):
    """Line for line what DALI's own tool writes."""
    build_index(file, file + ".idx")
    tool = Path(sys.executable).parent / "tfrecord2idx"
    subprocess.run([sys.executable, tool, file, file + ".theirs"], check=True, capture_output=True)
    assert Path(file + ".idx").read_text() == Path(file + ".theirs").read_text()
    assert len(Path(file + ".idx").read_text().splitlines()) == 9


def test_build_index_keeps_a_valid_one(file):
    first = build_index(file, file + ".idx")
    again = build_index(file, file + ".idx")
    forced = build_index(file, file + ".idx", force=True)
    assert (first.num_records, first.written) == (9, True)
    assert (again.num_records, again.written) == (9, False)
    assert (forced.num_records, forced.written) == (9, True)


def test_build_index_mends_a_stale_one(file):
    build_index(file, file + ".idx")
    write_tfrecord(Path(file), numbered_examples(4))
    assert build_index(file, file + ".idx").written
    assert len(read_index(file, file + ".idx")) == 4


def test_build_index_leaves_nothing_behind(tmp_path, file):
    Path(file).write_bytes(Path(file).read_bytes()[:-1])
    with pytest.raises(InputError, match="was cut short"):
        build_index(file, file + ".idx")
    assert os.listdir(tmp_path) == [os.path.basename(file)]


def test_build_index_leaves_nothing_behind_when_it_cannot_write(tmp_path, file, monkeypatch):
    build_index(file, file + ".idx")
    before = Path(file + ".idx").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        build_index(file, file + ".idx", force=True)
    assert Path(file + ".idx").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [os.path.basename(file), os.path.basename(file) + ".idx"]


def test_index_dir(tmp_path, file):
    (index_file,) = index_files_of([file], index_dir=str(tmp_path / "index"))
    build_index(file, index_file)
    assert index_file == str(tmp_path / "index" / "train-00000-of-00001.idx")
    assert len(read_index(file, index_file)) == 9
    with pytest.raises(InputError, match="cannot hold the index of 2 files that are all named train"):
        index_files_of(["a/train", "b/train"], index_dir="index")


def _older(file, index_file):
    status = os.stat(file)
    os.utime(index_file, ns=(status.st_atime_ns, status.st_mtime_ns - 1))


def _of_another_file(file, index_file):
    other = write_tfrecord(Path(file + ".other"), numbered_examples(9, first=1))
    build_index(other, index_file, force=True)


def _of_another_file_of_the_same_size(file, index_file):
    lines = [line.split() for line in Path(index_file).read_text().splitlines()]
    size = int(lines[0][1])
    Path(index_file).write_text(
        f"0 {size + 1}\n{size + 1} {int(lines[1][1]) - 1}\n" + "".join(f"{a} {b}\n" for a, b in lines[2:])
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_older, "this index is older than"),
        (_of_another_file, "this index ends at byte"),
        (_of_another_file_of_the_same_size, "this index is not that of"),
        (lambda _, index: Path(index).write_text(""), "found 0 numbers"),
        (lambda _, index: Path(index).write_text("0 17\n17"), "found 3 numbers"),
        (lambda _, index: Path(index).write_text("0 x\n"), "found something else"),
        (lambda _, index: Path(index).write_text("0 17\n18 5\n"), "line 2: expected offset 17, found 18"),
        (lambda _, index: Path(index).write_text("0 17\n17 0\n17 20\n"), "line 2: expected a size of at least 16, found 0"),
        (lambda _, index: Path(index).write_text("0 40\n40 -20\n"), "line 2: expected a size of at least 16, found -20"),
        (lambda _, index: Path(index).write_bytes(b"\xff\xfe\x00\n"), "found something else"),
    ],
)
def test_read_index_refuses(file, spoil, message):
    build_index(file, file + ".idx")
    spoil(file, file + ".idx")
    with pytest.raises(InputError) as caught:
        read_index(file, file + ".idx")
    assert message in str(caught.value)
    assert str(caught.value).count(f"make index DATA={file}") >= 1


def test_find_files(tmp_path, file):
    build_index(file, file + ".idx")
    second = write_tfrecord(tmp_path / "train-00001-of-00002", numbered_examples(1))
    assert find_files(str(tmp_path / "train-*")) == (file, second)  # sorted, without the index
    assert find_files([second, str(tmp_path / "*-of-*")]) == (file, second)  # each once
    os.symlink(tmp_path, tmp_path / "link")
    again = [tmp_path / "train-*", f"{tmp_path}/./train-*", f"{tmp_path}/link/train-*"]
    assert len(find_files(again)) == 2  # each once, whatever its spelling
    with pytest.raises(InputError, match="No file matches"):
        find_files(str(tmp_path / "none-*"))
    with pytest.raises(InputError, match="No file matches"):
        find_files([file, str(tmp_path / "missing")])
    with pytest.raises(InputError, match=r"is a directory: name the files in it, for example '.*/\*-of-\*'"):
        find_files(str(tmp_path))
    with pytest.raises(InputError, match="at least one TFRecord file"):
        find_files([])


def test_index_command():
    assert index_command("/a/train-*") == "make index DATA='/a/train-*'"
    assert index_command(["/a/t-*", "/b/t-*"], index_dir="/my index") == (
        "make index DATA='/a/t-*' INDEX_DIR='/my index' && make index DATA='/b/t-*' INDEX_DIR='/my index'"
    )
    assert index_command([f"/a/train-{number}" for number in range(9)]) == "make index DATA='/a/train-*'"
    assert index_command(Path("t")) == f"make index DATA={os.path.abspath('t')}"
    assert index_command("~/t") == f"make index DATA={os.path.expanduser('~/t')}"


def test_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write_tfrecord(tmp_path / "train", numbered_examples(1))
    assert find_files("~/train") == (file,)
    assert index_files_of([file], index_dir="~/index") == (str(tmp_path / "index" / "train.idx"),)
