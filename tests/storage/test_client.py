"""The thread that reads from stores ends before the program does."""

import asyncio
import threading

from dali_tf_input.storage import client


def test_the_end_waits_for_threads_that_hand_over_results(monkeypatch):
    """Python would end such a thread of obstore, and Rust would then abort the process."""
    own = client._Client()
    inside, may_leave = threading.Event(), threading.Event()
    call = asyncio.SelectorEventLoop.call_soon_threadsafe

    def slow(self, callback, *arguments, **options):
        handle = call(self, callback, *arguments, **options)
        if threading.current_thread() is thread:
            inside.set()
            assert may_leave.wait(60)
        return handle

    monkeypatch.setattr(asyncio.SelectorEventLoop, "call_soon_threadsafe", slow)
    thread = threading.Thread(target=own.loop.call_soon_threadsafe, args=(print,), daemon=True)
    thread.start()
    assert inside.wait(60)
    closing = threading.Thread(target=own.close, daemon=True)
    closing.start()
    own.thread.join(60)
    assert closing.is_alive()  # the loop has ended, the other thread has not
    may_leave.set()
    closing.join(60)
    assert not closing.is_alive()
