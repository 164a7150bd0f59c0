"""Where each figure of the results' headlines is in its JSON file, in the order in which its row names them.

A function takes the content of the file and `find`, which finds a row of a list by its fields."""

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from benchmarks.cpu.table import by_best_peer, means

Find = Callable[..., Any]
Figures = Callable[[Any, Find], list[float]]


def _baton(measure: str, target: str) -> Figures:
    return lambda d, _: [d["summary"][target]["ours"]["baton"][measure]]


def _decision(any_role: bool) -> Figures:
    def figures(d: Any, find: Find) -> list[float]:
        arrived = find(d["results"], instances=10_000, compiled=True, any_role=any_role)["RequestArrived"]
        return [arrived["p50_us"], arrived["p99_us"]]

    return figures


def _itl_at_4(d: Any, _: Find) -> list[float]:
    itl = d["local"]["summary"]["by_rate"]["4"]["itl_mean"]
    return [100 * itl["error"], 100 * itl["floor"]]


def _lost_behind(d: Any, _: Find) -> list[float]:
    seen = ("killed", "idempotency-key: repeated", "last-event-id: asked again", "plain: refused, retriable")
    outcomes = [each for found in d["behind"].values() for each in found.items() if each[0] not in seen]
    num_whole = sum(count for what, count in outcomes if what.endswith(": whole"))
    return [sum(count for _, count in outcomes) - num_whole, num_whole]


def _failed_cases(d: Any, _: Find) -> list[float]:
    return [sum(row["failed"] for row in d["rows"])]


def _fp8(d: Any, find: Find) -> list[float]:
    row = find(d["formats"], format="FP8, one scale")
    return [row["kept_bytes_tp1"] / row["floats_bytes_tp1"]]


def _closed_gap(d: Any, find: Find) -> list[float]:
    closed = find(d["results"], million_tokens=4)["gap_closed"]
    return [100 * closed["all told"], 100 * closed["half told"]]


def _read_back(d: Any, find: Find) -> list[float]:
    tiers = ("host", "disk")
    rows = [[find(d["rows"], tier=tier, mode=mode) for mode in ("learned", "room")] for tier in tiers]
    shares = [100 * learned["in_pool"] for learned, _ in rows]
    return shares + [learned["ttft_p50_ms"] / room["ttft_p50_ms"] for learned, room in rows]


def _pinned(d: Any, find: Find) -> list[float]:
    row = find(d["results"], million_tokens=4, first=0.1, pins="known")
    return [100 * row[f"{who} tenant"][when] for who in ("first", "second") for when in ("before", "after")]


def _overlap(d: Any, _: Find) -> list[float]:
    rows = [row for transport in d["results"].values() for row in transport["rows"] if row["pace"] == 2.0]
    return [100 * min(row["hidden_share"] for row in rows), 100 * max(row["exposed_of_ttft"] for row in rows)]


def _added(d: Any, _: Find) -> list[float]:
    return [d["added_to_engine"]["ray"][name] for name in ("ttft_p50_ms", "itl_p50_ms")]


def _balanced(d: Any, _: Find) -> list[float]:
    found = d["results"]["balancing, ep 4"]
    return [found[f"busiest rank by the mean, {when}"] for when in ("before", "after")]


def _structured(content: Any, _: Find) -> list[float]:
    found = content["results"]
    return [100 * found["step_growth"], found["known_adds_ms"], found["new_adds_p90_ms"]]


def _adapters(content: Any, find: Find) -> list[float]:
    steps = [(8, 1), (8, 8), (32, 1), (32, 8), (8, 0)]
    rows = content["results"]
    return [find(rows, quantization="none", batch=batch, adapters=count)["ratio"] for batch, count in steps]


def _native_attention(content: Any, _: Find) -> list[float]:
    by_way = list(content["cpu_ms"].values())[-2]
    return [by_way["torch"]["total"] / by_way["native"]["total"]]


def _losses(content: Any, find: Find) -> list[float]:
    rows = [
        find(content["formats"], format=name) for name in ("int8", "int4, groups of 32", "16 bits, KV int8")
    ]
    return [row["loss"] for row in rows]


def _drafts(content: Any, _: Find) -> list[float]:
    """The best source at batch 1, greedily, and the worst one at the largest batch, whatever the temperature."""

    def speeds(runs: dict[str, Any]) -> list[float]:
        return [
            run["speed"]
            for source, run in runs.items()
            if isinstance(run, dict) and source not in ("none", "control")
        ]

    found = content["results"]
    most = max(int(batch.split(",")[0].removeprefix("batch ")) for batch in found)
    large = [runs for batch, runs in found.items() if batch.startswith(f"batch {most},")]
    return [max(speeds(found["batch 1, temperature 0"])), min(min(speeds(runs)) for runs in large)]


def _products(content: Any, find: Find) -> list[float]:
    found = find(content["by_rows"], num_rows=96)
    shares, rates = found["share_of_rate_in_registers"], found["gop_s"]
    # A processor with AVX2 alone has no such product of oneDNN's.
    by_onednn = [
        row["bfloat16"] / row["oneDNN bfloat16"] for row in rates.values() if "oneDNN bfloat16" in row
    ]
    return [min(row["bfloat16"] for row in shares.values()), *([min(by_onednn)] if by_onednn else [])]


def _whole_products(content: Any, find: Find) -> list[float]:
    """The worst matrix: int8 with 96 and 512 rows, int4 with as many."""
    shares = [find(content["by_rows"], num_rows=rows)["share_of_rate_in_registers"] for rows in (96, 512)]
    return [min(row[way] for row in found.values()) for way in ("int8", "int4") for found in shares]


def _by_the_best(d: Any, _: Find) -> list[float]:
    return [d["ours_by_others"]["the best in each cell"][name] for name in ("mean", "worst")]


def _by_the_bound(d: Any, _: Find) -> list[float]:
    ever, long = d["by_bound"]["window"], d["by_bound"]["long run"]
    return [
        *(ever[name] for name in ("baton", "the best in each cell")),
        long["cells_within_reach"],
        long["cells"],
    ]


def _ahead(d: Any, _: Find) -> list[float]:
    """By how many points ours is ahead of the other that is best there, at each place."""
    others = [[one for one in of.values() if "ahead" in one] for of in d["places"].values()]
    return [100 * max(found, key=lambda one: one["mean"])["ahead"] for found in others if found]


def _overcommit(d: Any, _: Find) -> list[float]:
    """How many points more of ours are in time with host memory, at each place that was run with and without: mean, least."""
    ours = {place: of["baton"]["mean"] for place, of in d["places"].items()}
    gains = [
        100 * (share - ours[place.replace("+host", "")]) for place, share in ours.items() if "+host" in place
    ]
    return [fmean(gains), min(gains)]


def _servers(d: Any, find: Find) -> list[float]:
    def rate(bits: int, server: str) -> float:
        return find(d["servers"], bits=bits, server=server)["tokens_per_s"]

    ways = [(bits, way) for bits in (16, 8) for way in ("baton-local", "baton-ray")]
    return [rate(bits, way) / rate(bits, "vllm") for bits, way in ways]


def _loading_peaks(way: str) -> Figures:
    """Peaks while a model is loaded, by llama.cpp's."""

    def peak(d: Any, find: Find, bits: int, peer: str, way: str) -> float:
        return find(d["rows"], peer=peer, bits=bits, way=way)["phases"]["loading"]["peak_mb"]

    return lambda d, find: [
        peak(d, find, bits, "baton", way) / peak(d, find, bits, "llama_cpp", "") for bits in (16, 8, 4)
    ]


def _loading_s(row: Any) -> float:
    """The slower instance's seconds after its imports."""
    return max(sum(each.values()) - each["imports"] for each in row["phases_s"])


FIGURES: dict[str, list[Figures]] = {
    "goodput.json": [
        _baton("ratio_to_best_static", "0.9"),
        _baton("ratio_to_best_dynamic", "0.9"),
        _baton("ratio_to_best_static", "0.99"),
        _baton("ratio_to_best_dynamic", "0.99"),
        lambda d, _: [
            d["summary"][target]["ours"]["baton"]["worst_cell_against_any"] for target in ("0.9", "0.99")
        ],
    ],
    "goodput_wide.json": [_by_the_best, _by_the_bound],
    "goodput_minute.json": [_by_the_best],
    "goodput_long.json": [_ahead],
    "goodput_host.json": [_overcommit],
    "goodput_loads.json": [lambda d, _: [100 * one["ahead"] for one in d["names"].values()]],
    "goodput_fixed.json": [_by_the_best],
    "goodput_sure.json": [lambda d, _: [d["against"]["0.99"]["sarathi"]["geometric_mean"]]],
    "decisions.json": [_decision(any_role=False), _decision(any_role=True)],
    "shortlists.json": [lambda d, _: [d["relative_to_scan"]["conversation, any role"]["4 schedulers"]]],
    "load_balance.json": [
        lambda d, find: [find(d["results"], fleet="any role", rate=1.2)["imbalance_median"]]
    ],
    "links.json": [
        lambda d, _: [
            100 * d["results"]["2 prefill, 2 decode"]["0.3 GB/s"][way]["mean"]
            for way in ("assumed", "learned")
        ]
    ],
    "gpu_offline_paper.json": [
        lambda d, _: [
            d["rows"][0]["output_tokens_per_s"] / d["measured_tokens_per_s"],
            max(row["output_tokens_per_s"] for row in d["rows"]),
            d["bound"]["output_tokens_per_s"],
        ]
    ],
    "step_time_models.json": [
        lambda d, _: [d["modelled"]["model_mean_percent"], d["modelled"]["plane_mean_percent"]],
    ],
    "no_targets.json": [lambda d, _: list(d["worst"]["no targets"].values())],
    "fairness.json": [lambda d, _: [d["means"]["slack 0"]["jain"], 100 * d["means"]["slack 0"]["loss"]]],
    "simulator_speed.json": [lambda d, find: [find(d["results"], seconds=3600.0)["took_min"]]],
    "plan_questions.json": [
        lambda d, _: [d["num_asked"], d["slowest_s"], d["slowest_processor_s"], d["num_held"]]
    ],
    "fidelity.json": [_itl_at_4],
    "speculation.json": [_drafts],
    "engine_overhead.json": [lambda d, _: [d["results"]["batch 32, prompt 128"]["step p50"]]],
    "step_overhead.json": [
        lambda d, _: [
            d["results"][batch]["rank"] + d["results"][batch]["loop"] for batch in ("batch 1", "batch 32")
        ]
    ],
    "step_planning.json": [
        lambda d, find: [find(d["results"], context_tokens=n)["step_ms"] for n in (1000, 128_000)]
    ],
    "cold_start.json": [lambda d, _: [d["as_stored_by_through_floats"]["processor_s"]]],
    "deterministic.json": [lambda d, _: [d["results"]["float32"]["decode, 32"]["ratio"]]],
    "quantised_weights.json": [_fp8],
    "cpu_weights.json": [
        lambda d, _: [d["products"][way]["share"] for way in ("half", "int8", "int4")],
        lambda d, _: [d["cpu_speed_over_former"]["decode 8"][way] for way in ("full", "half", "int8")],
    ],
    "cpu_products.json": [_products, _whole_products],
    "cpu_step.json": [_native_attention],
    "adapters.json": [_adapters],
    "cpu_fused.json": [
        lambda d, _: [d["results"][bits]["decode 1"]["processors"] for bits in ("none", "int8", "int4")]
    ],
    "cpu_peers.json": [
        lambda d, _: list(means(d["cells"], "tokens_per_s").values()),
        lambda d, _: [min(ratios) for ratios in by_best_peer(d["cells"], "tokens_per_s").values()],
    ],
    "cpu_peers_zen5.json": [
        lambda d, _: list(means(d["cells"], "tokens_per_s").values()),
        lambda d, _: [min(ratios) for ratios in by_best_peer(d["cells"], "tokens_per_s").values()],
    ],
    "cpu_peers_zen5_1b.json": [
        lambda d, _: list(means(d["cells"], "tokens_per_s").values()),
        lambda d, _: [min(ratios) for ratios in by_best_peer(d["cells"], "tokens_per_s").values()],
    ],
    "cpu_peers_zen3.json": [
        lambda d, _: list(means(d["cells"], "tokens_per_s").values()),
        lambda d, _: [min(ratios) for ratios in by_best_peer(d["cells"], "tokens_per_s").values()],
    ],
    "cpu_servers.json": [_servers],
    "cpu_memory.json": [_loading_peaks("none"), _loading_peaks("found")],
    "cpu_sharing.json": [
        lambda d, find: [find(d["rows"], way=way)["pss_mb"] for way in ("none", "again")],
        lambda d, find: [_loading_s(find(d["rows"], way=way)) for way in ("none", "again")],
    ],
    "cpu_waking.json": [
        lambda d, find: [
            median(find(d["rows"], kept=kept)["first_token_s"])
            for kept in ("host", "cached", "disk", "nothing")
        ]
    ],
    "draws.json": [lambda d, _: [d["results"][way]["ratio"] for way in ("temperature", "top-p")]],
    "gguf_parity.json": [
        lambda d, _: [max(row[by] or 0.0 for row in d["rows"]) for by in ("baton", "llama_cpp")]
    ],
    "perplexity.json": [_losses],
    "transformers_backend.json": [
        lambda d, _: [d["time_over_transformers"]["decode 1"][way] for way in ("backend", "backend, auto")]
    ],
    "serving_overhead.json": [_added],
    "hostile_bodies.json": [lambda d, _: [d["worst"]["new"]]],
    "streaming.json": [lambda d, _: [d["results"]["/v1/chat/completions"]["us"]]],
    "resumable_streams.json": [lambda d, _: [100 * d[what]["token"] for what in ("added", "standard_error")]],
    "structured.json": [_structured, lambda d, _: [100 * d["results"]["bomb"]["growth_beside_others"]]],
    "batches.json": [lambda d, _: [row["falls_by_points"] for row in d["rows"]]],
    "load_balancer.json": [lambda d, _: [d["gaps_ms"]["haproxy"]["p50"]]],
    "prefix_cache.json": [_closed_gap],
    "prefix_tree.json": [lambda d, _: [d["ms"]["find"]]],
    "tier_placement.json": [
        lambda d, _: [100 * d["results"][told]["spared"] for told in ("the device alone", "tiers too")]
    ],
    "session_prefetch.json": [_read_back],
    "pins.json": [_pinned],
    "state_checkpoints.json": [
        lambda d, _: [row["third_by_without"] for row in d["rows"] if row["shared_tokens"] == 1024]
    ],
    "transport.json": [
        lambda d, _: [d["results"][f"{mib << 10} KiB"]["tcp_of_raw"] for mib in (4, 16)],
        lambda d, _: [d["results"]["4096 KiB"]["shm_of_raw"]],
    ],
    "transport_overlap.json": [_overlap],
    "remote_memory.json": [lambda d, _: [d["p50 ms"]["1 MiB"][whose] for whose in ("remote", "own")]],
    "encryption.json": [
        lambda d, _: [
            d[way][what]
            for what in ("KV, processor s per GB", "a message there and back, processor us")
            for way in ("TLS", "plain")
        ]
    ],
    "cluster_start.json": [lambda d, _: [d["kept / without"], d["cluster"]["kept"]["pss_mb"]]],
    "chaos.json": [_failed_cases],
    "scheduler_loss.json": [
        lambda d, _: [
            d["with spare"]["median_s"],
            d["with spare"]["longest_s"],
            d["without"]["median_s"],
        ]
    ],
    "chaos_hybrid.json": [_failed_cases],
    "soak.json": [
        lambda d, _: [d["failed_requests"], d["wrong_answers"], d["answers"], d["faults"]],
        lambda d, _: [one["rss_growth_percent"] for one in reversed(d["lived_through"])],
    ],
    "lost_behind_balancers.json": [_lost_behind],
    "lost_limits.json": [
        lambda d, _: [d["tenants"][name]["most_in_a_minute"] for name in ("requests", "tokens")]
    ],
    "parallel_ranks.json": [lambda d, _: [d["results"]["collectives, ms"]["all_reduce, 64 rows"]]],
    "served_grid.json": [lambda d, _: [d["wrong"], d["servers"]]],
    "served_grid_hybrid.json": [lambda d, _: [d["wrong"], d["servers"]]],
    "expert_balance.json": [_balanced],
}
"""For each file one function for each row that names it."""
