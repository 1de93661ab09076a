"""Placements that are solved: within limits, printed as what a user could have given, and as fast as predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.cli.errors import UsageError
from jaxllm.cli.tier_options import ServedLoad, solve_format, solve_placement
from jaxllm.infer.streaming import tier_benchmark
from jaxllm.infer.streaming.experts.expert_slots import ExpertSlots
from jaxllm.infer.streaming.experts.slot_fit import MixtureBytes
from jaxllm.infer.streaming.experts.slot_rates import SlotRates
from jaxllm.infer.streaming.fit_request import FitRequest
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import model_bytes
from jaxllm.infer.streaming.placement_fit import (
    LOADERS,
    BatchBlock,
    DoesNotFitError,
    ModelBytes,
    TierLimits,
    fit,
    predict,
    room,
    show,
    solve,
)
from jaxllm.infer.streaming.step_timeline import step_time
from jaxllm.infer.streaming.tier_rates import TierRates, roofline_rates
from jaxllm.models import functional
from tests.infer import engines

DISK = Path("d")
MODEL = ModelBytes((100,) * 10, 50, 1)
RATES = TierRates("test", (1, 8), (1.0, 2.0), (0.5, 0.5), host=200.0, disk=(50.0,))


def test_a_step_is_the_longest_of_what_overlaps():
    """By hand: alternating layers, of 0.1 s each, and reads of a layer that take 0.5 s from the host."""
    resident = step_time(["device"] * 10, MODEL.units, RATES, 1, 2, 2)
    assert resident.seconds == pytest.approx(1.5)
    assert resident.stalled == 0
    # All reads, one after another over one link, are longer than everything else.
    streamed = step_time(["host"] * 10, MODEL.units, RATES, 1, 4, 2)
    assert streamed.seconds == pytest.approx(5.0)
    # A window of one: each layer is read after the one before has computed; the first while the ends compute.
    serial = step_time(["host"] * 10, MODEL.units, RATES, 1, 1, 2)
    assert serial.seconds == pytest.approx(10 * (0.5 + 0.1))
    assert serial.stalled == pytest.approx(9 * 0.5)
    # From the disk two loaders read two layers in 4 s, and copy both in 1 s. One loader: 2.5 s for each.
    for loaders in (1, 2):
        assert step_time(["disk"] * 10, MODEL.units, RATES, 1, 4, loaders).seconds == pytest.approx(25.0)
    # Beside two reads computing is slower, and each has half of their rate: 8 layers in 8 * 0.1 * 4 s beside 5 bytes/s.
    busy = dataclasses.replace(RATES, disk=(20.0, 40.0), slowdowns=((2.0,) * 2, (4.0,) * 2),
                               disk_shares=((1.0,) * 2, (0.25,) * 2), end_seconds=(0.0, 0.0), host=1e9)  # fmt: skip
    both = step_time(["device"] * 8 + ["disk"] * 2, MODEL.units, busy, 1, 2, 2)
    alone = step_time(["device"] * 8 + ["disk"] * 2, MODEL.units, busy, 1, 2, 1)
    assert both.seconds == pytest.approx(3.2 + (100 - 3.2 * 5) / 20 + 0.2 + 0.2, rel=0.05)
    assert alone.seconds == pytest.approx(1.6 + (200 - 1.6 * 20) / 20 + 0.2 + 0.2, rel=0.05)
    few = step_time(["device", "device", "device", "device", "host"] * 2, MODEL.units, RATES, 1, 2, 1)
    assert few.seconds == pytest.approx(1.5)
    assert few.stalled == 0
    # Units whose weights are not there when the one before has half computed: of pairs that two loaders copy together
    # the first, but for one; with a window of one all but the first unit.
    assert (resident.late, streamed.late, serial.late, few.late) == (0, 4, 9, 0)
    fast = dataclasses.replace(RATES, host=1e9)
    assert [step_time(["host"] * 10, MODEL.units, fast, 1, window, 2).late for window in (1, 2)] == [9, 0]
    slow = dataclasses.replace(RATES, disk=(1.0,), slowdowns=((2.0, 3.0),))
    assert step_time(["disk"] + ["device"] * 9, MODEL.units, slow, 1, 1, 1).seconds == pytest.approx(
        100.5 + 0.1, rel=0.02
    )


def test_limits_are_kept_and_the_faster_tier_comes_first():
    limits = TierLimits(device=650, host=450, disk=DISK, length=10)
    for batch in (1, 4):
        shares = solve(MODEL, RATES, limits, BatchBlock(batch), 2)
        assert shares is not None
        device, host = room(MODEL, limits, BatchBlock(batch), 2)
        assert shares.device * 1000 == pytest.approx(device)
        assert shares.host * 1000 == pytest.approx(host)
        assert shares.device + shares.host + shares.disk == pytest.approx(1)
    for one in fit(MODEL, RATES, limits, [1, 4, 16]):
        window, batch = one.budget.window, one.batch
        assert one.bytes["device"] + window * 100 + 50 + batch * 10 <= 650
        assert one.bytes["host"] + 2 * 100 <= 450
        assert sum(one.bytes.values()) == 1000
        assert one.limit == "the disk"
        assert OffloadBudget.parse(str(one.budget)) == one.budget
        assert predict(MODEL, RATES, one.budget, batch) == one
    # All of it fits: nothing is read, and computing is the limit.
    (whole,) = fit(MODEL, RATES, TierLimits(1e4, 1e4), [8])
    assert (whole.bytes["device"], whole.limit) == (1000, "computing")
    assert whole.seconds == pytest.approx(2.5)
    assert whole.tokens_per_second == pytest.approx(8 / 2.5)
    with pytest.raises(DoesNotFitError, match="disk=DIR"):
        fit(MODEL, RATES, TierLimits(400, 100), [1])
    with pytest.raises(DoesNotFitError, match="left on the device"):
        fit(MODEL, RATES, TierLimits(100, 1e4, DISK), [1])


def test_whole_layers_keep_to_the_hosts_limit():
    """Shares of half a layer fit the device and the host together; whole layers do not, and there is no disk."""
    model = ModelBytes((100,) * 4, 0, 0)
    limits = TierLimits(device=350, host=150)
    assert solve(model, RATES, limits, BatchBlock(1), 1) is not None
    with pytest.raises(DoesNotFitError):
        fit(model, RATES, limits, [1], [1])
    (one,) = fit(model, RATES, dataclasses.replace(limits, host=200), [1], [1])
    assert one.bytes == {"device": 200, "host": 200, "disk": 0}


def test_loaders_are_as_many_as_pay_within_the_hosts_limit():
    """Each has a layer's buffer on the host: where a thread alone is slow, more of them read faster and leave less room
    for layers there. The choice is the fastest of all numbers given by hand."""
    rates = dataclasses.replace(RATES, disk=(20.0, 40.0, 50.0))
    chosen = {}
    for host in (100, 200, 400, 700, 900):
        limits = TierLimits(device=300, host=host, disk=DISK, length=10, page=1)
        seconds = {}
        for loaders in LOADERS:
            with contextlib.suppress(DoesNotFitError):
                seconds[loaders] = fit(MODEL, rates, dataclasses.replace(limits, loaders=loaders), [1], [2])[0].seconds
        (best,) = fit(MODEL, rates, limits, [1], [2], LOADERS)
        chosen[host] = best.budget.loaders
        assert best.seconds == min(seconds.values())
        assert best.budget.loaders == min(n for n in seconds if seconds[n] == best.seconds)
        assert best.budget.loaders * 100 + best.bytes["host"] <= host
    assert chosen == {100: 1, 200: 2, 400: 2, 700: 3, 900: 1}


def test_requests_and_rates_are_read(tmp_path, capsys):
    assert FitRequest.parse("window=2,device=4GiB") is None
    asked = FitRequest.parse("fit,device=2MiB,host=1MiB,disk=d,rates=r,length=64,window=3,loaders=4")
    assert asked == FitRequest(2 << 20, 1 << 20, DISK, Path("r"), 64, (3,), (4,))
    assert FitRequest.parse("fit,experts=3") == FitRequest(slots=3)
    assert FitRequest.parse("fit,host=1GiB") == FitRequest(host=1 << 30)
    assert FitRequest.parse("fit,disk=d") == FitRequest(disk=DISK, loaders=LOADERS)
    for text, said in (
        ("fit,absent=host,experts=2", "slots which load them"),
        ("fit,experts=2,batches=4", "batches by turns"),
        ("fit,experts_host=2", "fit finds that"),
        ("fit,kv_limit=1GiB", "fit finds that"),
        ("fit,length=x", "number of tokens"),
        ("fit,prompt=0", "number of tokens"),
        ("fit,device=much", "no part"),
        ("fit,rates=", "no part"),
        ("fit,experts=2,ahead=none", "leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            FitRequest.parse(text)
    with pytest.raises(ValueError, match="how much memory"):
        FitRequest().limits("cpu", None)
    assert FitRequest(device=5).limits("cpu", None).host > 0
    assert FitRequest(host=1).limits("gpu", {"bytes_limit": 100, "bytes_in_use": 10}).device == 81
    file = tmp_path / "rates.json"
    beside = dataclasses.replace(RATES, disk_cold=(5.0,), slowdowns=((1.0, 2.0),), disk_shares=((0.5, 1.0),))
    beside.write(file)
    assert TierRates.read(file) == beside
    slots = SlotRates(
        (1, 8), (0.25, 0.5, 1.0), ((4.0, 8.0), (3.0, 6.0), (1.5, 3.0)), ((6.0, 9.0), (3.0, 7.0), (1.5, 3.0)),
        ((5.0, 9.0), (3.5, 7.0), (1.5, 3.0)), loaders=1,
    )  # fmt: skip
    in_slots = dataclasses.replace(RATES, slots=slots)
    in_slots.write(file)
    assert TierRates.read(file) == in_slots
    assert [slots.seconds(8, share) for share in (0.125, 0.25, 0.75, 1.0)] == [9.0, 8.0, 4.5, 3.0]
    assert [slots.seconds(1, share, tier="files") for share in (0.25, 0.75)] == [5.0, 2.5]
    assert [slots.seconds(1, 0.25, late=late) for late in (0.0, 0.25, 1.0)] == [4.0, 4.5, 6.0]
    assert slots.seconds(1, 0.25, tier="files", late=1.0) == 5.0  # late ones were not measured
    assert "25% host   25% files    50% host   50% files        100%" in str(in_slots)
    assert "3000.00" in str(in_slots)
    cold = dataclasses.replace(in_slots, disk_cold=(5.0,)).cold()
    assert cold.slots == dataclasses.replace(slots, files=())
    with pytest.raises(ValueError, match="no loads of experts from files"):
        dataclasses.replace(slots, files=()).seconds(1, 0.5, tier="files")
    assert (beside.cold().disk, RATES.cold().disk) == ((5.0,), (50.0,))
    assert (beside.slowdown(1, 1), beside.slowdown(8, 3), beside.disk_share(1, 2)) == (1.0, 2.0, 0.5)
    assert "1.00 x,  50%" in str(beside)
    for wrong, said in (
        ({"slowdowns": ((1.0,),)}, "slowdowns needs a row"),
        ({"disk_shares": ((1.0, 1.0),) * 2}, "disk_shares needs a row"),
        ({"disk": ()}, "one loader at least"),
        ({"disk_cold": (1.0, 2.0)}, "cold ones for as many"),
        ({"disk": (0.0,)}, "above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(RATES, **wrong)
    for wrong, said in (
        ({"host": ((1.0,), (1.0,))}, "host needs a row"),
        ({"files_late": ((1.0, 1.0),)}, "files_late needs a row"),
        ({"shares": (0.25, 0.4, 0.5)}, "ascending to 1"),
        ({"shares": ()}, "ascending to 1"),
        ({"files": ((-1.0, 1.0),) * 3}, "above 0"),
        ({"loaders": 0}, "1 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(slots, **wrong)
    RATES.write(file)
    with pytest.raises(ValueError, match="tier rates"):
        TierRates.read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="as many of both"):
        dataclasses.replace(RATES, tokens=(1,))
    request = FitRequest(650, 450, DISK, file, length=10)
    budget = solve_placement(request, MODEL, ServedLoad(4))
    said = capsys.readouterr().err
    assert f"--offload {budget}" in said
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["1", "2", "4"]
    assert "requests of" not in said
    solve_placement(dataclasses.replace(request, prompt=4), MODEL, ServedLoad(4))
    said = capsys.readouterr().err
    assert re.search(r"requests of 4 \+ 6 tokens.*at most [0-9.]+ generated tokens/s \(limit: max_sequences\)", said)
    solve_placement(dataclasses.replace(request, prompt=4), MODEL, ServedLoad(4, step_tokens=5))
    assert "steps of at most 5:" in capsys.readouterr().err
    with pytest.raises(ValueError, match="below length = 10"):
        FitRequest.parse("fit,length=10,prompt=10")
    with pytest.raises(UsageError, match="bench MODEL --tiers"):
        solve_placement(dataclasses.replace(request, rates=None), MODEL, ServedLoad(4))


@pytest.mark.parametrize(
    ("asked", "load", "longest", "tokens"),
    [
        (10, ServedLoad(4, page=8), 0, 4 * 16 + 8),
        (None, ServedLoad(4, max_len=20, page=8), 99, 4 * 24 + 8),  # the engine's length
        (10, ServedLoad(4, max_len=80, page=8), 99, 80 + 8),  # one of the longest
        (10, ServedLoad(1, page=8), 99, 104 + 8),
        (None, ServedLoad(1), 0, 1024 + 32),
    ],
)
@pytest.mark.parametrize("batches", [None, 1])
def test_the_kv_cache_is_within_the_devices_limit(tmp_path, asked, load, longest, tokens, batches):
    """Pages for all sequences, at least for one of the greatest length, and one more; the budget has that limit."""
    rates = dataclasses.replace(RATES, host=1e9)  # the largest batch is the fastest
    rates.write(file := tmp_path / "rates.json")
    request = FitRequest(2000, 10**5, rates=file, length=asked, windows=(1,), batches=batches)
    model = dataclasses.replace(MODEL, token=1, stream=0, longest=longest)
    budget = solve_placement(request, model, load)
    if batches is None:
        assert budget.kv_limit == tokens
        assert budget.device + 100 + 50 + tokens <= 2000
    else:
        assert budget.kv_tokens == tokens - load.page
    assert OffloadBudget.parse(str(budget)) == budget
    with contextlib.suppress(UsageError):  # with a byte less fewer sequences may fit
        less = solve_placement(dataclasses.replace(request, device=150 + tokens - 1, batches=None), model, load)
        assert less.kv_limit is not None
        assert less.kv_limit < tokens


def test_a_prompt_is_shorter_than_the_engines_sequences(tmp_path):
    RATES.write(tmp_path / "rates.json")
    request = FitRequest(5000, 10**4, rates=tmp_path / "rates.json", prompt=40)
    solve_placement(request, MODEL, ServedLoad(1, max_len=41))
    with pytest.raises(UsageError, match="below length = 40"):
        solve_placement(request, MODEL, ServedLoad(1, max_len=40))


def test_the_fastest_format_is_chosen(tmp_path, capsys):
    """int8 of half the bytes is copied in half the time; where all fits, the one that computes fastest; by hand."""
    half = dataclasses.replace(MODEL, units=(50,) * 10)
    models = {"plain": MODEL, "int8": half, "int4": dataclasses.replace(MODEL, units=(10**6,) * 10)}
    asked = FitRequest.parse(
        f"fit,device=550B,host=2000B,length=10,formats=plain+int8+int4,rates={tmp_path}/r-{{}}.json"
    )
    assert asked is not None
    assert asked.formats == ("plain", "int8", "int4")
    assert asked.of_format("int8") == dataclasses.replace(asked, formats=(), rates=tmp_path / "r-int8.json")
    for name in models:
        dataclasses.replace(RATES, layer_seconds=(1.0, 2.0) if name == "plain" else (1.5, 3.0)).write(
            tmp_path / f"r-{name}.json"
        )
    chosen, budget = solve_format(asked, lambda weights: models[weights], ServedLoad(1))
    said = capsys.readouterr().err
    assert chosen == "int8"
    assert f"chosen: --weights int8 --offload {budget}" in said
    assert "no placement fits" in said  # in int4
    assert f"r-int8.json are of {RATES.device}, and this is {jax.devices()[0].device_kind}" in said
    seconds = {}
    for name in ("plain", "int8"):
        rates = TierRates.read(tmp_path / f"r-{name}.json")
        seconds[name] = fit(models[name], rates, TierLimits(550, 2000, length=10), [1])[0].seconds
    assert seconds["int8"] < seconds["plain"]
    room_for_all = dataclasses.replace(asked, device=10**5)
    assert solve_format(room_for_all, lambda weights: models[weights], ServedLoad(1))[0] == "plain"
    with pytest.raises(UsageError, match="in any of the formats int4"):
        solve_format(dataclasses.replace(asked, formats=("int4",)), lambda weights: models[weights], ServedLoad(1))
    with pytest.raises(UsageError, match=r"weights in plain: .*has no tier rates"):
        solve_format(dataclasses.replace(asked, rates=Path("r-{}")), lambda weights: models[weights], ServedLoad(1))
    for text, said in (("formats=int5", "no format of weights"), ("formats=plain+int8,rates=r", "of one format")):
        with pytest.raises(ValueError, match=said):
            FitRequest.parse(f"fit,{text}")


def test_the_kv_cache_counts_in_its_format():
    """In int8 a token has a byte for each number, and a scale for each head's vector."""
    model = functional(engines.model_of("mixtral", "float32"))
    plain, coded = (model_bytes(model, [1] * 2, {}, kv_dtype=form).token for form in ("auto", "int8"))
    heads = sum(2 * block.attention.kv_spec.kv_heads for block in model.config.blocks)
    assert plain % (4 * heads) == 0
    width = plain // (4 * heads)
    assert heads * width < coded <= heads * (width + 4)


def test_data_sheets_give_the_roofline():
    rates = roofline_rates("x", 1000, 500, flops=1e4, bandwidth=1e4, host=1, disk=1)
    assert rates.layers(1) == pytest.approx(0.1)  # reads the weights
    assert rates.layers(4) == pytest.approx(0.4)  # computes
    assert rates.layers(3) == pytest.approx(0.3)
    assert rates.layers(8192) == pytest.approx(2 * 500 * 8192 / 1e4)
    # 80% are experts, a token uses a quarter of them: 40% are read by one token, 55% by two; 40% compute.
    rates = roofline_rates("x", 1000, 500, flops=1e4, bandwidth=1e4, host=1, disk=1, expert_parameters=400, routed=0.25)
    assert rates.layers(1) == pytest.approx(0.04)
    assert rates.layers(2) == pytest.approx(0.08)  # 0.4 x 500 parameters of two tokens; bytes would take 0.055
    assert rates.layers(4096) == pytest.approx(2 * 200 * 4096 / 1e4)
    slow = roofline_rates("x", 1000, 500, flops=1e9, bandwidth=1e4, host=1, disk=1, expert_parameters=400, routed=0.25)
    assert slow.layers(2) == pytest.approx(0.1 * (0.2 + 0.8 * 7 / 16))


def test_a_request_for_more_slots_than_experts_is_refused(tmp_path):
    RATES.write(tmp_path / "rates.json")
    request = FitRequest(650, 10**4, rates=tmp_path / "rates.json", length=10, slots=9)
    with pytest.raises(UsageError, match="8 experts a layer"):
        solve_placement(request, MIXTURE, ServedLoad(1))
    with pytest.raises(UsageError, match="0 experts a layer"):
        solve_placement(request, MODEL, ServedLoad(1))
    assert solve_placement(dataclasses.replace(request, slots=3), MIXTURE, ServedLoad(1)).experts == 3


def test_bytes_of_a_mixture():
    """deepseek_v3 of the tests: a dense layer, then two of 6 experts, of which a token uses 2."""
    model = functional(engines.model_of("deepseek_v3", "float32"))
    ends = {"table": np.zeros((40, 16), np.float32)}
    found = model_bytes(model, [10, 20, 20], ends)
    assert (found.units, found.ends) == ((10, 20, 20), 40 * 16 * 4)
    assert found.expert_parameters == 2 * 6 * 3 * 16 * 8
    assert found.expert_parameters < found.parameters
    assert found.routed == pytest.approx(1 / 3)
    assert found.token == 3 * (8 + 4) * 4  # a latent and a rope key of each layer


MIXTURE = ModelBytes((100,) * 10, 50, 1, mixtures=MixtureBytes((20,) * 10, 100, 10, 8, 0.25, 10))
"""Ten layers of 20 bytes and 8 experts of 10, of which a token takes two."""


def test_loads_of_experts_by_chance_are_those_of_slots():
    """Counted with the engine's slots, on routings by chance: within 3% of the formula, and off where it is changed."""
    rng = np.random.default_rng(0)
    for slots in (2, 4, 7, 8):
        for tokens in (1, 3, 16):
            one = ExpertSlots(8, slots)
            loads = []
            for _ in range(3000):
                wanted = sorted({int(e) for _ in range(tokens) for e in rng.choice(8, 2, replace=False)})
                loads.append(sum(not one.has(expert) for expert in wanted))
                list(one.rounds(wanted))
            formula = MixtureBytes((1,), 1, 1, 8, 0.25, 1).missing(slots, tokens)
            assert np.mean(loads[100:]) == pytest.approx(formula, rel=0.03, abs=1e-12)
    assert MIXTURE.mixtures is not None
    assert MIXTURE.mixtures.choices() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert MixtureBytes((1,), 1, 1, 128, 0.1, 1).choices() == [16, 32, 48, 64, 80, 96, 112, 128]
    assert MixtureBytes((1,), 1, 1, 3, 0.1, 1).choices() == [1, 2, 3]


def test_a_step_with_slots_by_hand():
    """4 of 8 experts in slots: a token wants 2 of each of 10 layers, half of which are loaded in 10 / 200 s each."""
    budget = OffloadBudget(2, 200, experts=4)
    one = predict(MIXTURE, RATES, budget, 1)
    assert one.seconds == pytest.approx(1.0 + 0.5 + 10 * 2 * 0.5 * 10 / 200)
    assert one.bytes == {"device": 200 + 4 * 100, "host": 800, "disk": 0}
    assert one.limit == "computing"
    slots = SlotRates((1, 8), (0.25, 0.75, 1.0), ((9, 12), (5, 6), (2, 4)), loaders=1)
    measured = dataclasses.replace(RATES, slots=slots)
    slower = predict(MIXTURE, measured, budget, 1)
    assert slower.seconds == pytest.approx(0.5 + (9 + 5) / 2)
    assert slower.limit == "loads of experts"
    # Beyond what was measured the layers take in proportion to tokens, and loads as many as by chance.
    longer = predict(MIXTURE, measured, budget, 16)
    growth = (1 - 0.75**16) / (1 - 0.75**8)
    assert longer.seconds == pytest.approx(1.0 + 8 + growth * ((12 + 6) / 2 - 4))
    half = dataclasses.replace(budget, disk=DISK, experts_host=400)
    assert predict(MIXTURE, measured, half, 1).seconds == pytest.approx(7.5 + 10 * 0.5 * 10 / 50)
    slots = dataclasses.replace(slots, files=((11, 12), (9, 6), (2, 4)))
    with_files = dataclasses.replace(measured, slots=slots)
    assert predict(MIXTURE, with_files, half, 1).seconds == pytest.approx(0.5 + (7 + 10) / 2)
    # No router is asked ahead of a layer that is not there: with a window of one, all but the first of those streamed;
    # nor of the first one, before which there is none.
    slots = dataclasses.replace(slots, host_late=((19, 20), (9, 10), (2, 4)))
    late = predict(MIXTURE, dataclasses.replace(RATES, slots=slots, host=1e9), OffloadBudget(1, 0, experts=4), 1)
    assert late.late == 0.9
    assert late.seconds == pytest.approx(0.5 + 14)
    there = predict(MIXTURE, dataclasses.replace(RATES, slots=slots, host=1e9), OffloadBudget(2, 0, experts=4), 1)
    assert there.late == 0
    assert there.seconds == pytest.approx(0.5 + 0.9 * 7 + 0.1 * 14)
    # Layers and experts share the link: 10 layers of 20 bytes, and of each one expert of 10, at 100 bytes/s. Alone
    # either would hide behind computing, which takes 2.5 s with its loads.
    both = predict(MIXTURE, dataclasses.replace(RATES, host=100.0), OffloadBudget(4, 0, experts=4), 1)
    assert (both.limit, both.seconds) == ("copies from the host", pytest.approx(3.0))
    # Loads that were measured to take less than by chance: 0.2 s.
    few = SlotRates((1, 8), (0.5, 1.0), ((2.2, 4.2), (2.0, 4.0)))
    fewer = dataclasses.replace(RATES, host=50.0, slots=few)
    assert predict(MIXTURE, fewer, OffloadBudget(4, 0, experts=4), 1).seconds == pytest.approx(4.2)
    # Reads by more threads than were measured: 8 tokens miss 3.6 experts of a layer, one token misses one.
    slots = dataclasses.replace(slots, host_late=())
    with_files = dataclasses.replace(RATES, slots=slots, disk=(50.0, 80.0))
    two, one = (dataclasses.replace(budget, disk=DISK, experts_host=0, loaders=n) for n in (2, 1))
    assert predict(MIXTURE, with_files, one, 8).seconds == pytest.approx(0.5 + 9)
    assert predict(MIXTURE, with_files, two, 8).seconds == pytest.approx(0.5 + 9)  # files were as fast as the host
    slots = dataclasses.replace(slots, files=((11, 22), (9, 16), (2, 4)))
    with_files = dataclasses.replace(with_files, slots=slots)
    assert predict(MIXTURE, with_files, one, 8).seconds == pytest.approx(0.5 + 9 + 10)
    assert predict(MIXTURE, with_files, two, 8).seconds == pytest.approx(0.5 + 9 + 10 * 50 / 80)
    assert predict(MIXTURE, with_files, two, 1).seconds == predict(MIXTURE, with_files, one, 1).seconds
    # Half of the experts in files: half of the loads are reads of 10 / 50 s first.
    files = dataclasses.replace(budget, disk=DISK, experts_host=400)
    assert predict(MIXTURE, RATES, files, 1).seconds == pytest.approx(1.5 + 10 * (10 / 200 + 0.5 * 10 / 50))
    assert predict(MIXTURE, RATES, files, 1).bytes == {"device": 600, "host": 400, "disk": 400}
    # 8 tokens want 8 (1 - 0.75^8) experts.
    assert predict(MIXTURE, RATES, budget, 8).seconds == pytest.approx(2.5 + 10 * 4 * (1 - 0.75**8) * 10 / 200)
    with pytest.raises(ValueError, match="the model has none"):
        predict(MODEL, RATES, budget, 1)


@pytest.mark.parametrize(
    ("device", "host", "disk"), [(600, 1e4, None), (450, 1e4, None), (700, 500, DISK), (330, 300, DISK)]
)
def test_the_number_of_slots_is_the_best_of_all(device, host, disk):
    """The choice is the fastest of every number given by hand, whole layers among them, and keeps to the limits."""
    limits = TierLimits(device, host, disk, length=10)
    for batch in (1, 4):
        every = {}
        for slots in range(9):
            with contextlib.suppress(DoesNotFitError):
                every[slots] = fit(MIXTURE, RATES, limits, [batch], slots=[slots])[0]
        (best,) = fit(MIXTURE, RATES, limits, [batch])
        assert best.seconds == min(one.seconds for one in every.values())
        assert best.budget.experts > 0  # whole layers wait for 100 bytes of each
        assert best == every[best.budget.experts] == predict(MIXTURE, RATES, best.budget, batch, 10)
        for slots, one in every.items():
            largest = 20 if slots else 100
            assert one.bytes["device"] + one.budget.window * largest + 50 + batch * 10 <= device
            in_files = disk is not None
            assert one.bytes["host"] + in_files * (one.budget.loaders * largest) <= host
            assert OffloadBudget.parse(str(one.budget)) == one.budget
        assert "slots" in show([best])
        assert f" {best.budget.experts} " in show([best]).splitlines()[1]
    whole = fit(MIXTURE, RATES, TierLimits(1e4, 1e4), [1])[0]
    assert whole.budget.experts == 0  # all of it fits, and slots are no faster
    assert all(one.budget.experts == 0 for one in fit(MIXTURE, RATES, dataclasses.replace(limits, batches=2), [1]))


def test_rates_of_a_known_device_come_from_its_data_sheet(monkeypatch, tmp_path, capsys):
    """80 layers of 0.44 GB on an H100: with all its memory they stay there; with 16 GiB copies are the limit."""
    memory = {"bytes_limit": 80 * 10**9, "bytes_in_use": 0}
    gpu = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    model = ModelBytes((440_000_000,) * 80, 2 * 10**9, 320 << 10, 70 * 10**9)
    whole = solve_placement(FitRequest(host=10**12), model, ServedLoad(4))
    assert whole.device == pytest.approx(sum(model.units), rel=1e-5)
    part = solve_placement(FitRequest(device=16 << 30, host=10**12), model, ServedLoad(4))
    said = capsys.readouterr().err
    assert said.count("computing") == 3
    assert said.count("copies from the host") == 3
    # What is left over goes through the link of 64 GB/s, once a step.
    streamed = sum(model.units) - part.device
    fastest = float(said.splitlines()[-2].split()[7])
    assert fastest == pytest.approx(4 * 64e9 / streamed, rel=0.05)
    monkeypatch.setattr(tier_benchmark, "DISK_SAMPLE", 4096)
    slow = solve_placement(FitRequest(device=16 << 30, host=4 << 30, disk=tmp_path), model, ServedLoad(1))
    assert slow.disk == tmp_path
    assert slow.host is not None
    assert slow.host <= 4 << 30
