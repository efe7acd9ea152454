"""Measures records in a store some milliseconds away, against the same local files.

A server on this machine holds the files and answers each request late; it takes CPU time from the
same cores. Rows: nothing cached; a cache that holds everything; nothing cached over requests of
which 1 in 20 fails; and the index step, against a plain download of the same objects to files.

example: python scripts/benchmarks/store.py --files='path/train-*' --milliseconds=30
"""

import asyncio
import contextlib
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dali_tf_input import build_index
from dali_tf_input.cli import command
from dali_tf_input.storage.copies import download_to
from dali_tf_input.storage.objects import ObjectVersion, find_objects

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support import machine, processes
from support.benchmark import Stats, Window, format_stats
from support.flags import BACKENDS, FileFlags, WorkFlags
from support.throughput.candidates import Candidate
from support.throughput.rows import measure_in_turn, rates, ratios

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_MILLISECONDS = FLAGS.number("milliseconds", 30.0, "How late each answer comes.")
_SECONDS = FLAGS.number("seconds", 4.0, "Length of each measured window.", 0.01)
_REPEATS = FLAGS.integer("repeats", 5, "Measured windows of each row.", 1)
_BACKEND = FLAGS.choice("backend", "tf_data", list(BACKENDS), "What feeds the network.")
_JSON = FLAGS.string("json", None, "File for the results.")

_TARGETS = {"far": 0.9, "cached": 0.98, "failing": 0.7, "index": 0.8}
_FAILING = 20  # one in so many
_REQUEST = re.compile(rb"(\w+) /(\w+)/(\S+) (?:.*range: bytes=(\d+)-(\d+))?", re.S | re.I)
_HEAD = (
    "HTTP/1.1 {version} X\r\nContent-Length: {size}\r\nETag: 1\r\nLast-Modified: Thu, 01 Jan 2026"
    " 00:00:00 GMT\r\nContent-Range: bytes {first}-{last}/{total}\r\n\r\n"
)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:  # how this command starts its server
        asyncio.run(serve(arguments[1:]))
        return 0
    command.check_no_arguments(arguments)
    command.check_writable(_JSON)
    dataset, about = _FILES.dataset(), machine.describe()
    machine.print_lines(about)
    with tempfile.TemporaryDirectory() as folder, run_server(dataset.paths) as base:
        names = [os.path.basename(file) for file in dataset.paths]
        urls = {kind: [f"{base}/{kind}/{file}" for file in names] for kind in ("good", "flaky")}
        cache = [f"--cache_dir={folder}/cache"]
        for kind, kind_urls in urls.items():
            index_flags = [f"--index_dir={folder}/{kind}", *(cache if kind == "good" else [])]
            processes.run_index(*kind_urls, *index_flags)
        results = measure_training(
            local=_FILES.as_arguments(),
            far=as_flags(urls["good"], f"{folder}/good"),
            cached=[*as_flags(urls["good"], f"{folder}/good"), *cache],
            failing=as_flags(urls["flaky"], f"{folder}/flaky"),
        )
        results["index"] = measure_index(urls["good"], folder)
    lines = []
    for name, (ratio, what) in results.items():
        target = _TARGETS.get(name)
        verdict = f"{target} {'met' if ratio.median >= target else 'missed'}" if target else ""
        lines.append((name, format_stats(ratio), what, verdict))
    print()
    command.print_table(("records", "ratio", "measured", "target"), lines)
    rows = {name: {**vars(ratio), "measured": what} for name, (ratio, what) in results.items()}
    command.write_json(_JSON, {**about, "milliseconds": _MILLISECONDS.value, "rows": rows})
    return 0


def as_flags(urls: list[str], index_dir: str) -> list[str]:
    return [f"--index_dir={index_dir}", *(f"--files={url}" for url in urls)]


def measure_training(**row_flags: list[str]) -> dict[str, tuple[Stats, str]]:
    """Measures order "global" over files that flags name; returns ratios, and images/s.

    The ratios are to "local", that of "failing" is to "far". What a server elsewhere would leave of
    the speed is the ratio of this process's CPU times.
    """
    candidate = Candidate(_WORK.with_decode(BACKENDS[_BACKEND.value]), "global")
    rows = {name: (candidate, [*flags, *_WORK.as_arguments()]) for name, flags in row_flags.items()}
    window = {"seconds": _SECONDS.value, "warmup_batches": 16}
    windows = measure_in_turn(rows, repeats=_REPEATS.value, **window)
    results = {}
    for name, measured in windows.items():
        against = windows["far" if name == "failing" else "local"]
        words = f"{Stats.of(rates(measured)).median:,.0f} images/s"
        results[name] = (ratios(measured, against), words)
    costs = [
        [
            Window(**measurement["window"]).cpu_seconds_per_1000_images
            for measurement in windows[name]
        ]
        for name in ("local", "far")
    ]
    words = f"{statistics.median(costs[1]):.2f} ms an image"
    cpu = Stats.of([local / far for local, far in zip(*costs, strict=True)])
    return results | {"far, CPU time without the server's": (cpu, words)}


def measure_index(urls: list[str], folder: str) -> tuple[Stats, str]:
    """Returns how fast `build_index` is, as part of a plain download, and its rate."""
    objects = {url: version for pattern in urls for url, version in find_objects(pattern).items()}
    speeds, size = [], sum(version.size for version in objects.values())
    for _ in command.progress(range(_REPEATS.value), what="indexing", total=_REPEATS.value):
        plain, start = download_all(objects), time.perf_counter()
        build_index(urls, index_dir=f"{folder}/index", force=True, allow_missing=True)
        speeds.append((plain, time.perf_counter() - start))
    ratio = Stats.of([plain / index for plain, index in speeds])
    return ratio, f"{size / Stats.of([index for _, index in speeds]).median / 1e6:,.0f} MB/s"


def download_all(objects: dict[str, ObjectVersion]) -> float:
    """Returns the seconds that it takes to download objects to files, 8 of them at once."""

    def one(url: str) -> None:
        with tempfile.TemporaryFile() as stream:
            download_to(url, objects[url], stream.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, objects))
    return time.perf_counter() - start


@contextlib.contextmanager
def run_server(files: tuple[str, ...]) -> Iterator[str]:
    """Gives the URL of a server of `files`, a process of its own."""
    words = [sys.executable, os.path.abspath(__file__), f"--milliseconds={_MILLISECONDS.value}"]
    process = processes.start([*words, "serve", *files], stdout=subprocess.PIPE)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        processes.kill(process)


async def serve(files: list[str]) -> None:
    """Serves ranges of `files`, as /good/NAME and /flaky/NAME, until it is killed."""
    processes.die_with_parent()
    data = {}
    for file in files:
        with open(file, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            data[os.path.basename(file).encode()] = memoryview(mapped)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answers(loop, data), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Answers(asyncio.Protocol):
    """Answers the requests of a connection. It costs little, as it runs on the same cores."""

    count = 0  # of requests, of all connections

    def __init__(self, loop: asyncio.AbstractEventLoop, files: dict[bytes, memoryview]) -> None:
        self._loop, self._files, self._asked = loop, files, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._asked = (self._asked + data).split(b"\r\n\r\n")
        for request in requests:
            self._loop.call_later(_MILLISECONDS.value / 1000, self._answer, request)

    def _answer(self, request: bytes) -> None:
        asked = _REQUEST.match(request)
        assert asked
        method, kind, name, first, last = asked.groups()
        Answers.count += 1
        if name not in self._files:
            self._transport.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
            return
        fails, data = kind == b"flaky" and Answers.count % _FAILING == 0, self._files[name]
        start, end = int(first or 0), min(int(last or len(data)) + 1, len(data))
        version = 503 if fails else 206 if first else 200
        sizes = {"size": 0 if fails else end - start, "total": len(data)}
        head = _HEAD.format(version=version, first=start, last=end - 1, **sizes)
        self._transport.write(head.encode())
        if method == b"GET" and not fails:
            self._transport.write(data[start:end])


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
