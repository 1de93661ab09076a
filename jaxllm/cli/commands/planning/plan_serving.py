"""``jaxllm plan --serve``: finds the deployment that serves a model best, the smallest platform, the cheapest mix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.serving_arguments import hardware_table, platforms_of, served_model

if TYPE_CHECKING:
    from jaxllm.plan.hardware import Cluster
    from jaxllm.simulate import Deployment, RequestTrace, ServiceObjective
    from jaxllm.simulate.search.deployment_search import DeploymentSearchResult, PlannedDeployment
    from jaxllm.simulate.search.pool_search import Spending


def plan_serving(argv: list[str]) -> int:
    """Find the best deployment of a served model: `jaxllm plan MODEL --serve --on h200:8`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        on: str = "",
        trace: str = "poisson:1",
        lengths: str = "sharegpt",
        requests: int = 100,
        slo: str = "ttft=1,tpot=0.05",
        goal: Literal["latency", "energy", "goodput", "cost"] = "latency",
        weights: tuple[str, ...] = ("bfloat16",),
        kv_dtype: tuple[Literal["auto", "bfloat16", "int8", "fp8", "int4", "bfp4"], ...] = ("auto",),
        budgets: tuple[int, ...] = (512, 2048, 8192),
        max_sequences: int = 256,
        mla: Literal["exact", "tpla"] = "exact",
        kv_span: bool = False,
        top: int = 5,
        most: int | None = 12,
        compile: bool = False,
        users_at: int | None = None,
        mix: bool = False,
        pools: bool = False,
        price: str = "",
        hardware: Path | None = None,
        seed: int = 0,
        json: Path | None = None,
    ) -> int:
        """Searches meshes, formats and token budgets by simulation; several platforms: the smallest that suffices.

        With several platforms in --on they are tried in the order of their price, up to the first that meets the
        objective; without --on, all kinds of the hardware table in several sizes are. What is recommended also met the
        objective for other arrivals and lengths of the same distribution. The exit status is 1 if nothing does.

        Args:
            model: recipe, FILE.py:FUNCTION, config.json, or a model's directory.
            on: devices, as for `jaxllm simulate`, or a kind such as h200, of 1 to 16 devices; several, separated by
                commas; by default all kinds.
            trace: open-loop requests to serve, as for `jaxllm simulate`: poisson:RATE, bursty:RATE, or a file.
            lengths: prompt and completion lengths, as for `jaxllm simulate`.
            requests: number of simulated requests.
            slo: objective, as for `jaxllm simulate`.
            goal: least mean latency, least energy per token, the largest rate of a device that meets the objective
                (goodput), or the least price of a token at that rate (cost).
            weights: formats of the matrices to choose from.
            kv_dtype: formats of the KV cache to choose from.
            budgets: token budgets of a step to choose from.
            max_sequences: sequences in a batch at a time.
            mla: tpla: latents of multi-head latent attention in slices over tensor, as for `jaxllm serve`.
            kv_span: pages of a request are spread over context, as for `jaxllm serve`.
            top: number of deployments to show.
            most: deployments to simulate on a platform at most, by their lower bounds; None for all that those leave.
            compile: compile the largest prefill and decode programs of the shown deployments of the last platform, and
                report the compiler's memory beside the planned one.
            users_at: context length to say for how many users fit, and what prefill, decode and switching cost.
            mix: cheapest mix of the platforms in --on for these lengths, instead of one platform.
            pools: compare colocated engines with prefill and decode pools, and with engines whose attention has devices
                of its own: on one platform, on all of its devices, by the largest rate per device that meets the
                objective; on several, by the least price (--goal energy: rated power) that serves the trace, each pool
                of one kind, with as many devices as the largest.
            price: dollars an hour of one device, such as h200=2.5,h100=2.
            hardware: TOML or JSON file that changes or adds kinds of hardware.
            seed: seed of arrivals and lengths.
            json: file to write the results to.
        """
        import math

        from jaxllm.files import write_json
        from jaxllm.simulate import ServiceObjective, make_trace
        from jaxllm.simulate.search.deployment_search import candidates, search, smallest

        if compile and (mix or pools):
            raise UsageError("--compile is of the shown deployments of one search: leave --mix and --pools out.")
        if pools and (mla != "exact" or kv_span):
            raise UsageError("--pools does not go with --mla tpla or --kv-span, as when serving: leave one out.")
        check_outputs(json=json)
        config, _ = served_model(model)
        clusters = platforms_of(on, hardware_table(hardware, price))
        objective = ServiceObjective.parse(slo)
        asked = make_trace(trace, lengths=lengths, count=requests, seed=seed)
        if not math.isfinite(asked.rate):
            raise UsageError(
                f"--trace {trace}: a plan needs arrivals of a rate, such as poisson:4, bursty:4 or a file."
            )
        # A file has no other requests of its distribution.
        replay = None if trace.endswith((".jsonl", ".json")) else make_trace(
            trace, lengths=lengths, count=requests, seed=seed + 1
        )  # fmt: skip
        longest = max(one.longest for one in (asked, replay) if one is not None)

        def deployments(cluster: Cluster) -> list[Deployment]:
            return list(
                candidates(
                    config, cluster, asked, weights=weights, kv_dtypes=kv_dtype, budgets=budgets,
                    max_sequences=max_sequences, max_len=longest, mla=mla, kv_span=kv_span,
                )
            )  # fmt: skip

        if mix:
            return _print_mix([one for cluster in clusters for one in deployments(cluster)], asked, objective)

        if pools and len(clusters) > 1:
            spending = "power" if goal == "energy" else "cost"
            return _print_provision(deployments(clusters[0])[-1], clusters, asked, objective, spending)
        if pools:
            return _print_pools(deployments(clusters[0])[-1], asked, objective, top)

        def find(cluster: Cluster) -> DeploymentSearchResult:
            made = deployments(cluster)
            print(f"{model} on {cluster.name}: {len(made)} deployments, {asked.name}, {slo}", flush=True)
            found = search(made, asked, objective, goal, replay=replay, most=most)
            _print_search(found, top, goal)
            return found

        chosen, tried = smallest(clusters, find)
        if len(clusters) > 1:
            print(f"\nsmallest platform: {'none of these' if chosen is None else chosen.name}")
        best = tried[-1][1].best
        compiled = _compile(tried[-1][1].simulated[:top]) if compile else {}
        if users_at is not None and tried[-1][1].simulated:
            _print_users((best or tried[-1][1].simulated[0]).deployment, users_at)
        if json is not None:
            write_json(
                json,
                {cluster.name: [{"deployment": one.deployment.name, "meets": one.meets, goal: abs(one.value),
                                 "replayed": one.replayed, "knee": one.knee, **one.figures,
                                 **({"compiled": compiled[id(one)]} if id(one) in compiled else {})}
                                for one in found.simulated] for cluster, found in tried},
            )  # fmt: skip
            print(f"saved: {json}")
        return 0 if best is not None else 1

    return parse_command(run, argv, "jaxllm plan --serve")


def _compile(shown: list[PlannedDeployment]) -> dict[int, Any]:
    """Compiles the largest programs of deployments, prints their memory, and returns plain values by ``id``."""
    from jaxllm.cli.progress_line import progress_line
    from jaxllm.simulate.search.compiled_deployment import PlannedBytes, compile_deployment, why_not_compiled
    from sharding.isolate import OutOfDeviceMemory

    out: dict[int, Any] = {}
    for number, one in enumerate(shown, 1):
        deployment = one.deployment
        if reason := why_not_compiled(deployment):
            print(f"  {deployment.name}: not compiled: {reason}")
            out[id(one)] = {"refused": reason}
            continue
        if not out:
            columns = f"{'weights':>9}{'KV cache':>10}{'temporary':>11}{'all':>9}{'of':>9}"
            print(f"\nGiB of a device{'':29}{'budget':>7}{columns}")
        planned, memory = PlannedBytes.of(deployment), deployment.cluster.hardware.hbm_bytes
        sizes = (planned.weights, planned.cache, planned.temporaries, planned.total, memory)
        weights, cache, temporary, total, there = (f"{size / 2**30:.2f}" for size in sizes)
        print(f"{deployment.name:44}{deployment.engine.max_batched_tokens:>7}{weights:>9}{cache:>10}{temporary:>11}"
              f"{total:>9}{there:>9}", flush=True)  # fmt: skip
        try:
            found = compile_deployment(deployment, progress=progress_line(f"{number} of {len(shown)}: "))
        except OutOfDeviceMemory as error:
            over = f"{(error.need - error.limit) / 2**30:.2f} GiB too much"
            print(f"  compiled: {over}")
            out[id(one)] = {"refused": over}
            continue
        out[id(one)] = found.to_json()
        for name, report in found.programs.items():
            arguments, rest, total = (
                f"{size / 2**30:.2f}"
                for size in (report.argument_bytes, report.total_bytes - report.argument_bytes, report.total_bytes)
            )
            fits = "" if report.fits else f", {report.over_bytes / 2**30:.2f} too much"
            print(f"  {'compiled: ' + name:49}{arguments:>19}{rest:>11}{total:>9}{fits}")
    return out


UNITS = {"latency": "s a request", "energy": "J a token", "goodput": "req/s, device", "cost": "$/M at knee"}


def _print_search(found: DeploymentSearchResult, top: int, goal: str) -> None:
    if found.simulated:
        head = f"{'':44}{'budget':>7}{UNITS[goal]:>14}{'TTFT p90':>10}{'TPOT p90':>10}{'within':>8}{'tokens/s':>10}"
        print(f"{head}{'$/M':>8}{'J/token':>9}")
    for one in found.simulated[:top]:
        f, name = one.figures, one.deployment.name
        dollars, joules = f["dollars_per_million_tokens"], f["joules_per_token"]
        print(
            f"{name:44}{one.deployment.engine.max_batched_tokens:>7}{abs(one.value):>14.3f}{f['ttft']['p90']:>10.3f}"
            f"{f['tpot']['p90']:>10.4f}{f['within_slo']:>8.0%}{f['tokens_per_second']:>10,.0f}"
            f"{'-' if dollars is None else f'{dollars:.2f}':>8}{'-' if joules is None else f'{joules:.2f}':>9}"
        )
    print(
        f"{len(found.simulated)} simulated, {found.pruned} cannot be better or were left out, "
        f"{len(found.refused)} refused"
    )
    for one in found.simulated[:top]:
        if one.replayed is not None:
            verdict = "recommended" if one.meets else "not recommended"
            print(f"  {one.deployment.name}: {one.replayed:.0%} within for other requests, {verdict}")
    for name, reason in list(dict(found.refused).items())[: 0 if found.best else 3]:
        print(f"  {name}: {reason}")


def _print_users(deployment: Deployment, context: int) -> None:
    from jaxllm.simulate.long_context import long_context

    found = long_context(deployment, context)
    print(
        f"\n{context:,} tokens on {deployment.name}: {found.users:,} users of {found.cache_bytes / 2**30:.2f} GiB of "
        f"KV cache; prefill {found.prefill:.2f} s, decode {1e3 * found.decode:.1f} ms a token with all of them, "
        f"{found.switch:.2f} s to switch from one user to another"
    )


def _print_mix(accelerators: list[Deployment], trace: RequestTrace, slo: ServiceObjective) -> int:
    """Prints the cheapest mix of accelerators, and what its simulation says."""
    import numpy as np

    from jaxllm.simulate.search import accelerator_mix
    from jaxllm.simulate.search.deployment_search import fit

    # One engine of each kind; the mix says how many.
    usable = [one for one in accelerators if one.engines == 1 and not fit(one)]
    unpriced = sorted({one.cluster.hardware.name for one in usable if one.dollars_per_hour is None})
    if unpriced:
        raise UsageError(f"a mix needs prices: --price {','.join(f'{name}=DOLLARS' for name in unpriced)}.")
    if not usable:
        raise UsageError("the model fits none of these platforms.")
    histogram = accelerator_mix.buckets(trace)
    capacity = accelerator_mix.capacities(histogram, usable, slo)
    prices = [one.dollars_per_hour or 0.0 for one in usable]
    rates = np.asarray([bucket.rate for bucket in histogram])
    found = accelerator_mix.replayed_mix(histogram, capacity, usable, trace, slo)
    spare = f", planned for {found.load:.2f} of the load" if found.load > 1 else ""
    print(f"cheapest mix for {trace.name}: ${found.mix.dollars_per_hour:,.2f} an hour{spare}")
    for one, count, simulation in zip(usable, found.mix.counts, found.served, strict=True):
        if count and simulation is not None:
            print(
                f"  {count} x {one.cluster.name} ({one.name}, budget {one.engine.max_batched_tokens}): "
                f"{len(simulation.requests)} requests, {simulation.within(slo):.0%} within the objective"
            )
    for number, one in enumerate(usable):
        if (capacity[:, number] > 0).all():
            alone = accelerator_mix.cheapest_mix(found.load * rates, capacity[:, [number]], [prices[number]])
            print(f"  only {one.cluster.name} ({one.name}): ${alone.dollars_per_hour:,.2f}")
    print(f"simulated: {found.within:.0%} of the requests within the objective")
    return 0 if found.within >= slo.share else 1


def _print_pools(base: Deployment, trace: RequestTrace, slo: ServiceObjective, top: int) -> int:
    """Prints placements of prefill and decode pools, and of attention pools, beside colocated engines."""
    from jaxllm.simulate.attention_split import attention_splits
    from jaxllm.simulate.search.pool_search import colocated, described, place, pool_splits

    ways = {"disaggregated": pool_splits(base), "attention pool": attention_splits(base), "colocated": colocated(base)}
    found = {what: place(some, trace, slo) for what, some in ways.items()}
    print(f"{'requests/s':>10}{'a device':>10}  {base.devices} devices, {trace.name}")
    for what, placements in found.items():
        for one in placements[:top]:
            print(f"{one.rate:>10.3g}{one.goodput_per_device:>10.3g}  {what}: {described(one.placement)}")
    return 0 if any(one.rate > 0 for placements in found.values() for one in placements) else 1


def _print_provision(
    base: Deployment, clusters: list[Cluster], trace: RequestTrace, slo: ServiceObjective, spending: Spending
) -> int:
    """Prints the cheapest pools of several kinds of devices beside the cheapest colocated engines."""
    from jaxllm.simulate import Deployment
    from jaxllm.simulate.attention_split import mixed_attention_splits
    from jaxllm.simulate.search.pool_search import described, mixed_splits, provision

    kinds = {one.hardware.name: one.hardware for one in clusters}
    most = max(one.devices for one in clusters)
    ways, unit = list(mixed_splits(base, list(kinds.values()), most)), "$ an hour" if spending == "cost" else "W"
    each = {
        "disaggregated": [one for one in ways if not isinstance(one, Deployment)],
        "attention pool": list(mixed_attention_splits(base, list(kinds.values()), most)),
        "colocated": [one for one in ways if isinstance(one, Deployment)],
    }
    print(f"up to {most} devices of {', '.join(kinds)}, {trace.name}: {sum(map(len, each.values()))} ways")
    status = 1
    for what, some in each.items():
        found = provision(some, trace, slo, spending)
        if found is None:
            print(f"{what}: none meets the objective")
            continue
        print(f"{what}: {found[1]:,.2f} {unit}: {described(found[0])}")
        status = 0
    return status
