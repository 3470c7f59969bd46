"""Programs of a kernel side by side in Triton's interpreter, which runs them one after another."""

import inspect
import random
import sys
import threading

import triton.language as tl  # noqa: F401 (the interpreter looks for it beside a kernel)
from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder


class Program(threading.Thread):
    """A program that runs when it is its turn, until it gives the turn back."""

    def __init__(self, kernel, arguments):
        super().__init__(daemon=True)
        self.kernel, self.arguments, self.index = kernel, arguments, BUILDER.grid_idx
        self.turn, self.pause, self.error = threading.Event(), threading.Event(), None

    def run(self):
        self.turn.wait()
        try:
            self.kernel(**self.arguments)
        except Exception as error:
            self.error = error
        self.turn = None
        self.pause.set()

    def give_back(self):
        """Let others go on, until it is this program's turn again."""
        self.turn.clear()
        self.pause.set()
        self.turn.wait()

    def go_on(self):
        """Run to the next pause, and return whether there is more to do."""
        BUILDER.grid_idx = self.index
        self.pause.clear()
        self.turn.set()
        self.pause.wait()
        if self.error is not None:
            raise self.error
        return self.turn is not None


def interleave(kernel, pause_after, monkeypatch, seed=0):
    """Let the programs of each launch of `kernel` take turns at random.

    A program may pause after each call of `pause_after`, a device function, by its name in the kernel's module.
    """
    module, original = sys.modules[kernel.fn.__module__], kernel.rewrite()
    pausing, generator = getattr(module, pause_after), random.Random(seed)
    programs = []

    def pause(*arguments):
        result = pausing(*arguments)
        threading.current_thread().give_back()
        return result

    def launch(**arguments):
        programs.append(Program(original, arguments))
        if BUILDER.grid_idx == tuple(size - 1 for size in BUILDER.grid_dim):
            waiting = [*programs]
            programs.clear()
            for program in waiting:
                program.start()
            while waiting:
                program = generator.choice(waiting)
                if not program.go_on():
                    waiting.remove(program)

    launch.__signature__, launch.__annotations__ = inspect.signature(original), original.__annotations__
    monkeypatch.setitem(kernel.rewritten_fn, kernel.fn, launch)
    monkeypatch.setattr(module, pause_after, pause)
