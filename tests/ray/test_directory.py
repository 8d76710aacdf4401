"""Tests of the directory by which services under Ray find each other."""

from __future__ import annotations

from baton_ray.service import EXPIRY_S, SETTLING_S, Announcement, Directory


def test_a_service_is_told_where_those_of_the_wanted_role_listen() -> None:
    now_s = 0.0
    directory = Directory(clock=lambda: now_s)
    now_s = SETTLING_S
    assert directory.exchange(Announcement("decode", "d1", "10.0.0.1:1"), "prefill") == ()
    assert directory.exchange(Announcement("prefill", "p1", "10.0.0.2:2"), "") == ()
    assert directory.exchange(Announcement("prefill", "p2", "10.0.0.1:2"), "") == ()
    assert directory.exchange(Announcement("decode", "d1", "10.0.0.1:1"), "prefill") == ("10.0.0.2:2", "10.0.0.1:2")
    assert directory.exchange(Announcement("gateway", "g", "127.0.0.1:3"), "decode") == ("10.0.0.1:1",)


def test_a_service_that_is_silent_is_listed_no_more_and_one_that_speaks_keeps_its_place() -> None:
    now_s = 0.0
    directory = Directory(clock=lambda: now_s)
    first, second = Announcement("prefill", "p1", "10.0.0.1:1"), Announcement("prefill", "p2", "10.0.0.2:1")
    directory.exchange(first, "")
    directory.exchange(second, "")
    now_s = SETTLING_S
    assert directory.exchange(first, "prefill") == ("10.0.0.1:1", "10.0.0.2:1")
    now_s = EXPIRY_S
    assert directory.exchange(first, "prefill") == ("10.0.0.1:1",)


def test_a_new_directory_lists_nobody_before_all_can_have_announced_themselves() -> None:
    now_s = 100.0
    directory = Directory(clock=lambda: now_s)
    caller = Announcement("decode", "d1", "10.0.0.1:1")
    directory.exchange(Announcement("prefill", "p1", "10.0.0.2:1"), "")
    now_s += SETTLING_S - 0.01
    assert directory.exchange(caller, "prefill") == (), "the list would be a part of all services"
    directory.exchange(Announcement("prefill", "p2", "10.0.0.2:2"), "")
    now_s += 0.01
    assert directory.exchange(caller, "prefill") == ("10.0.0.2:1", "10.0.0.2:2")
