"""Copies of functions in which some names have other values."""

from liger_like.patches.rewriting import with_names

OTHER = 1


def made(offset):
    def wrapped(): ...

    def function(x, *, factor=2):
        return [factor * x + offset + OTHER + added(y) for y in (0,)]

    function.__wrapped__ = wrapped
    return function


def added(y):
    return y + 100


def test_names_are_changed_and_the_module_stays_alive(monkeypatch):
    function = made(10)
    copy = with_names(function, {"added": lambda y: y})
    assert (function(3), copy(3), copy(3, factor=0)) == ([117], [17], [11])
    monkeypatch.setitem(globals(), "OTHER", 5)
    assert (function(3), copy(3)) == ([121], [21])
    monkeypatch.setitem(globals(), "added", lambda y: 1000)
    assert (function(3), copy(3)) == ([1021], [21])
    assert copy.__code__.co_firstlineno == function.__code__.co_firstlineno
