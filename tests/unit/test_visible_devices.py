from __future__ import annotations

import pytest

from ddtrace_pytorch.identity.visible_devices import Entry, canonical_uuid, visible_entries

A, B = "GPU-c6909485-c86b-edbd-daee-2c5fa831cf57", "GPU-2bbcf4c4-1012-f1f9-4ba8-21adfca399f5"
SLICE = "MIG-a1b2c3d4-0000-5000-8000-00000000000a"


# What driver 580 made of such texts on a host with two GPUs, A and B. Lists that end at a number or UUID without a GPU
# are the business of `find`.
SEEN = [
    ("", []),
    ("-1", []),
    ("NoDevFiles", []),
    ("0", [0]),
    ("1,0", [1, 0]),
    ("0,,1", [0]),
    (",1", []),
    ("0,0", []),
    ("1,0,1", []),
    ("0,-1,1", [0]),
    (" 1", [1]),
    ("1 ", [1]),
    ("1, 0", [1, 0]),
    ("\n1", [1]),
    ("1\t", [1]),
    ("+1", [1]),
    ("01", [1]),
    ("-0", [0]),
    ("--1", []),
    ("1-0", [1]),
    ("1abc", [1]),
    ("0x1", [0]),
    ("1;0", [1]),
    ("0 1", [0]),
    ("0.5", [0]),
    ("0,NoDevFiles", [0]),
    ("NoDevFiles,0", []),
    ("all", []),
    ("none", []),
    ("void", []),
    ("99999999999999999999", []),
    ("9" * 5000, []),
    ("GPU", []),
    ("G", []),
    (A, [A]),
    ("GPU-C6909485", ["GPU-c6909485"]),
    ("gpu-c6909485", []),
    (A + ",1", [A]),
    ("1," + A, [1]),
    (B + "," + A, [B, A]),
    (A + "," + A, []),
    (A + " ", [A]),
    (A + "x", [A]),
    (" " + A, []),
    (A + ", " + B, [A]),
    (A[4:], []),
]


@pytest.mark.parametrize(("text", "expected"), SEEN)
def test_the_list_is_read_as_the_driver_reads_it(text, expected):
    entries = visible_entries(text)
    assert [entry.uuid or entry.ordinal for entry in entries] == expected


def test_unset_means_all_and_is_not_the_same_as_empty():
    assert visible_entries(None) is None
    assert visible_entries("") == ()


def test_both_spellings_of_a_slice_are_read():
    assert visible_entries("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2") == (
        Entry(uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", instance=(1, 2)),
    )
    assert visible_entries(SLICE) == (Entry(uuid=SLICE),)
    assert visible_entries(SLICE + ",0") == (Entry(uuid=SLICE),)


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        (A, A),
        (A[4:], A),
        (A.upper(), A),
        (f" {A.lower()}\n", A),
        ("mig-" + SLICE[4:].upper(), SLICE),
    ],
)
def test_a_uuid_has_one_spelling(text, spelling):
    assert canonical_uuid(text) == spelling
