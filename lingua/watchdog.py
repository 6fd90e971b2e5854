"""Ends every rank of a run when one has failed, died or stands still, and says which and why.

Without it, the others wait inside a collective: for half an hour by PyTorch's default, and then name the wrong rank.
A thread on each rank writes a sign of life into a small store on rank 0 and looks there for bad news.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lingua.distributed import World
from lingua.errors import UserError

FAILED = "failed"
LIBRARIES = (os.path.dirname(os.__file__), "site-packages", "dist-packages", "<frozen")
# What other ranks see first of one that is gone; the cause is elsewhere.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "NCCL")


class Watchdog:
    """The thread, and what the run tells it.

    Args:
        timeout: seconds without progress of a rank after which the run ends.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.name = f"rank {world.rank} ({socket.gethostname()}, pid {os.getpid()})"
        self.interval = min(2.0, timeout / 10)
        self.silence = max(5 * self.interval, timeout / 10)  # a thread that says nothing for so long is dead
        self._ticks, self._beat, self._place = 0, 0, "start"
        self._stopped, self._ending = threading.Event(), threading.Lock()
        if world.size == 1:
            return
        host, patience = os.environ["MASTER_ADDR"], timedelta(seconds=max(timeout, 10))
        if world.is_first:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        port = world.from_first(self._store.port if world.is_first else None)
        if not world.is_first:
            self._store = dist.TCPStore(host, port, wait_for_workers=False, timeout=patience)
        self._store.set(f"name/{world.rank}", self.name)
        self._lock = threading.Lock()  # one request at a time on the connection
        for target in (self._watch, self._guard):
            threading.Thread(target=target, daemon=True, name="watchdog").start()

    def tick(self, place: str) -> None:
        """This rank has made progress, and is now at ``place``."""
        self._ticks, self._place = self._ticks + 1, place

    def stop(self) -> None:
        """The run is over on every rank: what happens from here on is no failure."""
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """End this process because of ``error``, and with it all others. Alone, do nothing.

        Exit status: 2 for a user's mistake, 130 for a second Ctrl-C, else 1. The first rank to fail prints its cause in
        full; the others say whom they follow.
        """
        if self.world.size == 1:
            return
        is_mistake = isinstance(error, UserError)
        status = 2 if is_mistake else 1
        text = f"error: {error}" if is_mistake else "".join(traceback.format_exception(error)).strip()
        if isinstance(error, KeyboardInterrupt):
            status, text = 130, "interrupted, without saving"
        verdict = None
        if any(word in str(error) for word in CONSEQUENCES):
            verdict = self._wait_for_verdict(self.silence + 4 * self.interval)
        elif is_mistake and not self.world.is_first:  # often every rank meets the same one: the first is to say it
            verdict = self._wait_for_verdict(2 * self.interval)
        if verdict is None:
            self._stopped.set()  # this thread speaks for the rank from here on
            own = f"{self.name}: {text}"
            verdict = self._ask(lambda: self._store.compare_set(FAILED, "", own).decode())
            verdict = None if verdict == own else verdict
        if verdict is not None and verdict.endswith(text):
            verdict, text = None, text if self.world.is_first else ""
        self._end(text, status) if verdict is None else self._follow(verdict)

    def _wait_for_verdict(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._ask(lambda: self._store.check([FAILED])):
                return self._ask(lambda: self._store.get(FAILED).decode())
            time.sleep(self.interval / 4)
        return None

    def _ask(self, request: Callable[[], Any]) -> Any:
        """A request to the store; None if its host is gone."""
        try:
            with self._lock:
                return request()
        except (dist.DistError, RuntimeError):
            return None

    def _follow(self, verdict: str) -> None:
        """End this rank because of another; a launcher that asks any of them hears of a user's mistake."""
        self._end(f"stopping, because of {verdict}", 2 if "): error: " in verdict.partition("\n")[0] else 1)

    def _end(self, text: str, status: int) -> None:
        self._ending.acquire()  # whichever thread comes first speaks
        if text:
            print(f"[rank {self.world.rank}] {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(2 * self.interval if self.world.is_first else 0)  # the store lives here: let the others read it
        os._exit(status)

    def _guard(self) -> None:
        """End this rank when its requests to rank 0 hang, which has been stopped or lost its network."""
        beat = waited = 0
        while not self._stopped.wait(self.interval):
            # Rounds and not seconds: a long call that holds Python's lock stops both threads alike.
            waited = waited + 1 if self._beat == beat else 0
            beat = self._beat
            if waited * self.interval > self.silence + self.interval:
                silent = waited * self.interval
                self._end(f"stopping, because of rank 0, which has not answered for {silent:g} s (stopped?)", 1)

    def _watch(self) -> None:
        seen: dict[int, tuple[str, float]] = {}  # by rank: last sign of life, and when it changed
        moved: dict[int, tuple[str, float]] = {}  # by rank: last progress, and when it changed
        while not self._stopped.wait(self.interval):
            self._beat += 1
            try:
                with self._lock:
                    self._store.set(f"beat/{self.world.rank}", f"{self._beat} {self._ticks}")
                    failed = self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
                    if failed is None and self._store.check(["where"]):
                        self._store.set(f"where/{self.world.rank}", self._where())
                    if failed is None and self.world.is_first:
                        failed = self._judge(seen, moved)
            except (dist.DistError, RuntimeError):
                if self._stopped.wait(self.interval):
                    return
                failed = "rank 0: its process is gone (killed? out of memory?)"
            if failed is not None and not self._stopped.is_set():
                self._follow(failed)

    def _judge(self, seen: dict[int, tuple[str, float]], moved: dict[int, tuple[str, float]]) -> str | None:
        """On rank 0: what is wrong with whom, if anything is; every rank reads it."""
        now = time.monotonic()
        for rank in range(self.world.size):
            key = f"beat/{rank}"
            beat, ticks = self._store.get(key).decode().split() if self._store.check([key]) else ("", "")
            if seen.get(rank, ("?", 0))[0] != beat:
                seen[rank] = (beat, now)
            if moved.get(rank, ("?", 0))[0] != ticks:
                moved[rank] = (ticks, now)
        silent = [rank for rank, (_, since) in seen.items() if now - since > self.silence]
        stuck = [rank for rank, (_, since) in moved.items() if now - since > self.timeout]
        if not silent and not stuck:
            return None
        if silent:
            verdict = "; ".join(
                f"{self._name(rank)}: no sign of life for {self.silence:g} s (killed? out of memory? stopped?)"
                for rank in silent
            )
        else:
            verdict = self._ask_where()
        self._store.set(FAILED, verdict)
        return verdict

    def _ask_where(self) -> str:
        """Where each rank stands, those first that do not wait for others."""
        self._store.set("where", "?")
        self._store.set("where/0", self._where())
        deadline = time.monotonic() + 3 * self.interval
        keys = [f"where/{rank}" for rank in range(self.world.size)]
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(self.interval / 10)
        places = {
            rank: self._store.get(key).decode() if self._store.check([key]) else "says nothing"
            for rank, key in enumerate(keys)
        }
        order = sorted(places, key=lambda rank: places[rank].startswith("waits"))
        lines = [f"{self._name(rank)} {places[rank]}" for rank in order]
        return f"no progress for {self.timeout:g} s (distributed.timeout): " + "\n  ".join(lines)

    def _name(self, rank: int) -> str:
        key = f"name/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else f"rank {rank}"

    def _where(self) -> str:
        """What the main thread is doing."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        waits = any(os.path.join("torch", "distributed") in frame.filename for frame in stack)
        own = [frame for frame in stack if not any(part in frame.filename for part in LIBRARIES)] or stack
        last = own[-1]
        return (
            f"{'waits for others' if waits else 'stands'} in {last.name}, {last.filename}:{last.lineno} ({self._place})"
        )
