import pytest
import torch

from tilestream.cli.demo.check import Checker


def problem(m=96, n=80, k=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = torch.randn(k, n, generator=generator).to(dtype)
    return x, w, torch.mm(x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_own_answer_is_right(dtype):
    x, w, y = problem(dtype=dtype)
    verdict = Checker(x, w, y, (32, 32)).check(y.clone())
    assert verdict.right
    assert verdict.maximum == verdict.maximum_torch < verdict.maximum_allowed
    assert verdict.missing == 0


@pytest.mark.parametrize("where", [(0, 0), (95, 79), (40, 33), (63, 64)])
def test_one_wrong_element_anywhere_is_found(where):
    x, w, y = problem()
    out = y.clone()
    out[where] += 0.01
    assert not Checker(x, w, y, (8, 8)).check(out).right


def test_a_tile_left_undone_is_found():
    x, w, y = problem()
    out = y.clone()
    out[40:48, 32:40] = float("nan")
    verdict = Checker(x, w, y, (8, 8)).check(out)
    assert not verdict.right
    assert verdict.missing == 64


def test_rows_swapped_are_found():
    x, w, y = problem()
    out = y.clone()
    out[[50, 51]] = out[[51, 50]]
    assert not Checker(x, w, y, (8, 8)).check(out).right


def test_a_few_units_in_the_last_place_are_allowed():
    x, w, y = problem()
    out = y * (1 + 2**-24)
    assert Checker(x, w, y, (32, 32)).check(out).right


def test_many_small_errors_are_found_by_the_frobenius_norm():
    x, w, y = problem(k=512)
    verdict = Checker(x, w, y, (96, 80)).check(
        y.double().add(0.9 * 2 * (y.double() - x.double() @ w.double()).abs().max()).float()
    )
    assert verdict.frobenius > verdict.frobenius_allowed
    assert not verdict.right


def test_corners_are_always_sampled_and_tiles_larger_than_the_output_are_cut():
    x, w, y = problem()
    checker = Checker(x, w, y, (8, 8))
    assert {(0, 0), (0, 9), (11, 0), (11, 9)} <= set(checker._sample)
    assert Checker(x, w, y, (1024, 1024)).check(y).tiles == 1


def test_rows_that_are_not_finite_are_left_out():
    x, w, _ = problem()
    x[3, 5], x[60, 1] = float("nan"), float("inf")
    y = torch.mm(x, w)
    verdict = Checker(x, w, y, (32, 32)).check(y.clone())
    assert verdict.right
    out = y.clone()
    out[10, 10] = float("nan")
    assert not Checker(x, w, y, (32, 32)).check(out).right


def test_nothing_finite_leaves_nothing_to_measure():
    x, w, _ = problem()
    y = torch.mm(x.fill_(float("nan")), w)
    verdict = Checker(x, w, y, (32, 32)).check(y.clone())
    assert (verdict.right, verdict.elements) == (True, 0)


def test_overflow_to_infinity_as_torch_does_is_allowed():
    x, w = torch.full((32, 64), 100.0, dtype=torch.float16), torch.full((64, 32), 100.0, dtype=torch.float16)
    y = torch.mm(x, w)
    assert y.isinf().all()
    assert Checker(x, w, y, (16, 16)).check(y.clone()).right
    assert not Checker(x, w, y, (16, 16)).check(torch.full_like(y, float("nan"))).right
