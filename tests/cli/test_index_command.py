"""`python -m dali_tf_input index`: what it prints, and the commands that it prints."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from commands import fails, rows, run, succeeds
from conftest import jpeg, numbered_examples, write_tfrecord

from dali_tf_input import Records


def test_index(tmp_path):
    good = write_tfrecord(tmp_path / "train-0", numbered_examples(3))
    process = run("index", tmp_path / "train-*")
    assert process.returncode == 0
    assert process.stderr == ""
    names = [line.split()[0] for line in process.stdout.splitlines()]
    assert names == ["files", "records", "size", "verified", "features", "labels"]
    assert rows(process.stdout)["labels"] == "0 to 2, in all 3 records"
    shown = rows(process.stdout)
    assert (shown["files"], shown["records"]) == ("1 indexed", "3")
    assert shown["verified"] == "framing 1 file"
    assert shown["features"] == "TF-slim: image/class/label, image/encoded"
    assert len(Path(good + ".idx").read_text().splitlines()) == 3
    for flags, said in (([], "0 indexed, 1 unchanged"), (["--force"], "1 indexed")):
        process = run("index", *flags, tmp_path / "train-*")
        assert rows(process.stdout)["files"] == said
    shown = rows(run("index", "--verify=decode", "--decoder=dali", tmp_path / "train-*").stdout)
    assert shown["labels"] == "0 to 2, 3 classes"
    assert shown["images"] == "JPEG 3; largest height 44, largest width 52"


def test_index_of_good_and_bad_files(tmp_path):
    """The good files are indexed, each bad one is named, and the exit code is 1."""
    write_tfrecord(tmp_path / "a", numbered_examples(3))
    cut = write_tfrecord(tmp_path / "b", numbered_examples(2))
    os.truncate(cut, os.path.getsize(cut) - 1)
    (tmp_path / "c").write_bytes(b"\x1f\x8b rest of a gzip file")
    (tmp_path / "d").touch()
    process = run("index", f"--index_dir={tmp_path}/index", tmp_path / "?")
    assert process.returncode == 1
    lines = process.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{cut}: record 1, byte ")
    assert "cut short: expected a record of" in lines[0]
    assert lines[1].startswith(f"{tmp_path}/c: GZIP file: ")
    assert f"gunzip -c {tmp_path}/c > {tmp_path}/c.tfrecord" in lines[1]
    assert lines[2] == f"{tmp_path}/d: empty file: expected records, found an empty file."
    said = "error: 3 bad records in 3 of 4 files. Those files were not indexed."
    assert lines[3].startswith(said)
    fix = f"-m dali_tf_input index --on_bad=skip --index_dir={tmp_path}/index '{tmp_path}/?'"
    assert lines[3].endswith(fix)
    assert rows(process.stdout)["files"] == "1 indexed, 3 with bad records"
    assert rows(process.stdout)["GZIP file"] == "1"
    assert sorted(os.listdir(tmp_path / "index")) == ["a.idx", "index_manifest.json"]


@pytest.mark.usefixtures("checked_here")
def test_index_skips_bad_records(tmp_path):
    examples = numbered_examples(100)
    examples[40]["image/encoded"] = b"404 not found"
    write_tfrecord(tmp_path / "train", examples)
    assert run("index", tmp_path / "train").returncode == 0
    flags = ["--verify=decode", "--decoder=dali", "--on_bad=skip"]
    process = succeeds(run("index", *flags, tmp_path / "train"))
    assert rows(process.stdout)["skipped"] == "1 record (1.00%), listed in bad_records.jsonl"
    assert json.loads((tmp_path / "bad_records.jsonl").read_text())["record"] == 40
    process = run("index", "--on_bad=skip", "--max_bad_fraction=0.001", tmp_path / "train")
    said = "1 of 100 records are bad, 1.00%, over `max_bad_fraction` 0.10%"
    fails(process, said, "--max_bad_fraction")
    assert Records.from_files(tmp_path / "train").num_records == 99  # as it was before


def test_index_hints_at_labels_from_1(tmp_path):
    write_tfrecord(
        tmp_path / "train", [{"image": jpeg(9, 9), "label": label} for label in (1, 2, 5)]
    )
    for level, known in (("framing", "in all 3 records"), ("schema", "3 classes")):
        process = run("index", f"--verify={level}", tmp_path / "train")
        hint = "; none is 0: if classes count from 1, train with ClassLabel(offset=1)"
        assert rows(process.stdout)["labels"] == f"1 to 5, {known}{hint}"
    flags = ["--verify=schema", "--label_offset=1", "--num_classes=4", "--force"]
    process = run("index", *flags, tmp_path / "train")
    fails(process, "label range: `label.key` 'label' must be in 1 to 4, found 5", bad_records=True)


def test_keys_that_no_record_has(tmp_path):
    """Also at a level that does not read the records: a sample shows their features."""
    write_tfrecord(tmp_path / "train", [{"image": jpeg(9, 9), "label": 1}] * 3)
    for flag in ("image_key", "label_key", "mask_key"):
        process = run("index", f"--{flag}=other", tmp_path / "train")
        name = flag.replace("label_key", "label.key")
        fails(process, f"`{name}` 'other' is not in the records, which hold 'image', 'label'")


def test_keys_that_no_record_of_a_sample_has(tmp_path, caplog):
    """That says nothing of the others, so it is said and no more."""
    examples = [{"image": jpeg(9, 9), "label": 1} for _ in range(300)]
    examples[50]["rare"] = 1
    write_tfrecord(tmp_path / "train", examples)
    assert run("index", "--label_key=rare", tmp_path / "train").returncode == 0
    assert "Of a sample of " in caplog.text
    assert "`label.key` 'rare' is not in the records" in caplog.text


def test_a_sample_recommends_no_offset(tmp_path):
    """A record of class 0 is not in it."""
    labels = [0 if number == 50 else 1 + number % 5 for number in range(300)]
    images = [{"image": jpeg(9, 9), "label": label} for label in labels]
    write_tfrecord(tmp_path / "train", images)
    process = run("index", tmp_path / "train")
    assert rows(process.stdout)["labels"].startswith("1 to 5, in a sample of ")
    assert "offset" not in process.stdout
    process = run("index", "--verify=schema", tmp_path / "train")
    assert rows(process.stdout)["labels"] == "0 to 5, 6 classes"


def test_index_makes_the_label_of_its_flags(tmp_path):
    """Each kind of label, and the flags that are for another one."""
    example = {"image": jpeg(9, 9), "label": [2, 4], "name": "dog", "pair": [0.5, 1.0]}
    write_tfrecord(tmp_path / "train", [example])
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    for flags, known in (
        (
            ["--label=multi_hot", "--label_offset=2", "--num_classes=3"],
            "2 to 4, 2 classes, up to 2",
        ),
        (["--label=values", "--label_size=2", "--label_key=pair"], "0.5 to 1, in all 1 record, up"),
        ([f"--vocabulary={names}", "--label_key=name"], None),
        (["--label=none"], "2 to 4, in all 1 record, up to 2 in a record"),
    ):
        process = succeeds(run("index", "--verify=schema", *flags, tmp_path / "train"))
        assert rows(process.stdout).get("labels", "").startswith(known or "")
    for flags, message in (
        (["--label=values"], "--label=values needs --label_size, how many numbers."),
        (["--label_size=2"], "`label_size` is for --label=values only, got --label=class."),
        (["--label=none", f"--vocabulary={names}"], "`vocabulary` is for --label=class only, got"),
        (
            ["--label=values", "--label_size=2", "--num_classes=3"],
            "`num_classes` is for --label=class and --label=multi_hot only, got --label=values.",
        ),
        (["--num_classes=0"], "`num_classes` must be at least 1, got 0."),
    ):
        fails(run("index", "--verify=schema", *flags, tmp_path / "train"), message)


def test_index_progress_without_a_terminal(capsys, monkeypatch):
    """Plain lines, and only where it takes long; on a terminal a bar, which the terminal shows."""
    from dali_tf_input.cli import index as command
    from dali_tf_input.index.build import Progress

    with command.IndexProgress(names_all=True) as progress:
        done = Progress(files=1, num_files=1024, records=1250, bytes=10**8, num_bytes=10**9)
        progress.update(done)
        assert capsys.readouterr().err == ""
        later = time.monotonic() + 20
        monkeypatch.setattr(command.time, "monotonic", lambda: later)
        progress.update(done)
    line = capsys.readouterr().err
    assert line.startswith("indexing: 1 of 1,024 files, 1,250 records, 5 MB/s, 3 min ")
    assert line.endswith(" s left\n")


def test_index_without_files(tmp_path):
    fails(run("index", tmp_path / "none-*"), "No file matches")
    fails(run("index"), "at least one TFRecord file")
    fails(run("index", tmp_path), "is a directory")
    fails(run("index", "hdfs://host/train-*"), "from s3://, gs://, az://, http://")


def run_printed(text):
    """Runs the last index command in `text`, from another folder."""
    command = re.findall(r"\S+ -m dali_tf_input index .*", text.strip())[-1]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    _, _, _, *arguments, _ = words.stdout.split("\0")
    return run(*arguments, cwd="/")


def test_printed_commands_fix(tmp_path):
    """The command in a message is run as it is, and fixes the problem; test_advice.py has more.

    Faults by given checks stay faults by the command that leaves them out.
    """
    write_tfrecord(
        tmp_path / "a file's name", [{"photo": jpeg(9, 9), "class": label} for label in range(200)]
    )
    arguments = ("--verify=schema", "--num_classes=199", "--image_key=photo", "--label_key=class")
    process = run("index", *arguments, tmp_path / "a file's name")
    fails(process, "label range", bad_records=True)
    succeeds(run_printed(process.stderr))
    dataset = Records.from_files(tmp_path / "a file's name", image_key="photo")
    assert (dataset.num_records, dataset.features["class"].range) == (199, (0, 198))


def test_a_shell_expands_a_pattern_to_indexes_too(tmp_path):
    """The second time; they are passed over, as those that a pattern matches are."""
    for number in range(2):
        write_tfrecord(tmp_path / f"train-{number}", numbered_examples(2))
    for _ in range(2):
        succeeds(run("index", *sorted(tmp_path.iterdir())))
    fails(run("index", tmp_path / "train-0.idx"), "No file matches")


def test_many_bad_records_are_counted(tmp_path):
    """A wrong flag makes all records bad: 20 of a kind are named."""
    examples = [{"image/encoded": b"x", "image/class/label": number} for number in range(50)]
    write_tfrecord(tmp_path / "train", examples)
    process = run("index", "--verify=schema", "--num_classes=20", tmp_path / "train")
    assert process.returncode == 1
    named = [line for line in process.stderr.splitlines() if ": label range: " in line]
    assert len(named) == 20
    assert "more are counted below: label range" in process.stderr
    assert "30 of 50 records do not hold what the checks name" in process.stderr


def test_files_that_hold_no_records(tmp_path):
    """They cannot be skipped: what is no TFRecord is to be left out of the pattern."""
    write_tfrecord(tmp_path / "train-00000-of-00001", [{"image": b"", "label": 1}])
    (tmp_path / "labels.txt").write_text("cat\n")
    process = run("index", f"{tmp_path}/*")
    assert process.returncode == 1
    assert process.stderr.endswith(
        "files hold no records, and were not indexed. Replace them or leave them out.\n"
    )
