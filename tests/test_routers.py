"""Every router on small fleets whose right answer is known, and the order in which routers come out on a conversation-like load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analytics.fleet.cache import BLOCK_FIELDS, CAPACITY, EVICTABLE, FREE, FREED_US, ID, LIVE, NEXT
from analytics.fleet.config import FleetConfig
from analytics.fleet.generator import TenantSpec, generate
from analytics.fleet.lab import BOUND, fleet_for, jittered, router_table, saturation_factor, shared_kv_bound
from analytics.fleet.replay import replay
from analytics.fleet.routers import ROUTERS, Router, RouteRequest, RouterSpec, View, describe
from analytics.fleet.routing.memory import NOTICED
from analytics.fleet.scenarios import LOOPS, MIXED
from analytics.fleet.workload import Workload
from bench.lab import fleet_replay
from bench.routers import WEIGHTS, coarser, summary
from ingest.errors import UsageError

BS = 10
COST = (0.01, 0.0)  # 10 ms a token, whatever stands before it


def view(**columns: list[int]) -> View:
    """A fleet that is up, idle and empty but for what is named; `pinned` and `evictable` are blocks of 100."""
    n = len(next(iter(columns.values())))
    fleet = View.idle(n, BS, requests=64, cost=COST)
    fleet.up[:] = True
    fleet.capacity_blocks[:] = fleet.engine[:, CAPACITY] = fleet.engine[:, LIVE] = fleet.engine[:, FREE] = 100
    for name, values in columns.items():
        if name == "pinned":
            fleet.engine[:, FREE] -= np.array(values)
        elif name == "evictable":
            fleet.engine[:, EVICTABLE] = values
        else:
            getattr(fleet, name)[:] = values
    return fleet


def request(number: int = 0, prompt: int = 100, **fields: object) -> RouteRequest:
    return RouteRequest(number, 0, -1, prompt, -1)._replace(**fields)


def router(name: str, **params: float) -> Router:
    return RouterSpec(name, params).build(seed=3)


def first(name: str, fleet: View, asked: RouteRequest | None = None, **params: float) -> int:
    return router(name, **params).choose(asked or request(), fleet)


def test_random_reaches_all_alike_and_round_robin_takes_turns() -> None:
    fleet = view(hit_blocks=[0, 0, 0, 0])
    anywhere, turns = router("random"), router("round_robin")
    counts = np.bincount([anywhere.choose(request(), fleet) for _ in range(4000)], minlength=4)
    assert np.abs(counts - 1000).max() < 150  # 5 standard deviations are 137
    assert [turns.choose(request(), fleet) for _ in range(5)] == [0, 1, 2, 3, 0]
    fleet.up[1] = False
    assert [turns.choose(request(), fleet) for _ in range(4)] == [2, 3, 0, 2]


def test_sticky_sessions_leave_above_twice_the_average_load() -> None:
    sticky, affinity = router("session_sticky"), router("session_affinity")
    mine = request(session=2)
    for each in (sticky, affinity):
        assert each.choose(mine, view(queued_tokens=[5, 0, 5, 5])) == 1
        assert each.choose(mine, view(queued_tokens=[0, 50, 50, 0])) == 1, "exactly twice the average"
    busy = view(queued_tokens=[9, 60, 40, 0])
    assert affinity.choose(mine, busy) == 1
    assert sticky.choose(mine, busy) == 3 and sticky.choose(mine, view(queued_tokens=[0, 0, 0, 0])) == 3


def test_smetric_places_sessions_by_load_once_and_the_rest_always() -> None:
    rule = router("smetric")
    assert rule.choose(request(session=1), view(queued_tokens=[1, 0])) == 1
    assert rule.choose(request(session=1), view(queued_tokens=[0, 99])) == 1
    assert rule.choose(request(head=7), view(queued_tokens=[1, 0])) == 1
    assert rule.choose(request(head=7), view(queued_tokens=[0, 99])) == 0, "no session: by load"


def test_sglang_follows_its_own_tree_until_out_of_balance() -> None:
    rule = router("sglang_cache_aware", abs_threshold=4.0)
    chain = np.arange(10, dtype=np.int32)
    asked = request(chain=chain)
    assert rule.choose(asked, view(waiting=[1, 0, 1])) == 1
    assert rule.choose(asked, view(waiting=[0, 3, 0])) == 1, "its tree says so, whatever the caches hold"
    assert rule.choose(request(chain=np.r_[chain[:3], 90:97].astype(np.int32)), view(waiting=[0, 3, 1])) == 0, "30 % is not above 0.3"
    assert rule.choose(asked, view(waiting=[2, 5, 0])) == 2, "5 - 0 > 4 and 5 > 1.5 * 0: shortest queue"


def test_sglang_forgets_the_least_recently_used_leaf() -> None:
    rule = router("sglang_cache_aware", max_tree_tokens=100.0)  # 10 blocks
    old, new = np.arange(8, dtype=np.int32), np.arange(20, 25, dtype=np.int32)
    only_first = view(waiting=[0, 9])
    assert rule.choose(request(prompt=80, chain=old), only_first) == 0
    assert rule.choose(request(prompt=50, chain=new), only_first) == 0  # pushes out 3 of the 8, the last ones
    loaded = view(waiting=[5, 0])
    assert rule.choose(request(prompt=160, chain=old), loaded) == 0, "5 blocks of 16 are left: 31 %"
    rule = router("sglang_cache_aware", max_tree_tokens=100.0)
    assert [rule.choose(request(prompt=80, chain=old), only_first), rule.choose(request(prompt=50, chain=new), only_first)] == [0, 0]
    assert rule.choose(request(prompt=180, chain=old), loaded) == 1, "5 of 18: 28 %"


def test_llm_d_adds_up_normalised_scorers() -> None:
    # queue (4-q)/4: 0, 1, 0.5; KV 1-usage: 0.5, 0.2, 1; prefix: 1, 0, 0. Weights 2, 2, 3: 4.0, 2.4, 3.0
    fleet = view(waiting=[4, 0, 2], pinned=[50, 80, 0], hit_blocks=[10, 0, 0])
    assert first("llm_d", fleet) == 0
    assert first("llm_d", fleet, prefix=1.0) == 2  # 2.0, 2.4, 3.0
    assert first("llm_d", fleet, prefix=0.0, kv=0.0) == 1


def test_dynamo_adds_prefill_and_active_blocks() -> None:
    # 10 prompt blocks. scale 1: (new ahead + own new) + held + own new: 2+4+0+4 = 10, 0+8+1+8 = 17, 0+10+0+10 = 20
    fleet = view(new_tokens=[20, 0, 0], pinned=[0, 1, 0], hit_blocks=[6, 2, 0])
    assert first("dynamo", fleet) == 0
    fleet.new_tokens[0] = 200  # 20+4+0+4 = 28
    assert first("dynamo", fleet) == 1
    assert first("dynamo", fleet, prefill_load_scale=0.0) == 0  # 4, 9, 10


def test_preble_exploits_a_majority_hit_and_explores_otherwise() -> None:
    rule = router("preble_e2")
    assert rule.choose(request(0, 100), view(hit_blocks=[0, 6, 0])) == 1, "60 cached > 40 missing"
    # Window load: instance 1 has 0.4 s of prefill placed on it; 40 cached of 100 is no majority: L + P is 1.0, 0.4 + 0.6 + ..., 1.0
    assert rule.choose(request(1, 100), view(hit_blocks=[0, 3, 2])) == 2  # 1.0, 0.4+0.7, 0.8
    assert router("preble_e2").choose(request(0, 100), view(hit_blocks=[5, 4, 0])) == 0  # exactly half: explore, least missing


def test_preble_hands_over_when_the_heaviest_exceeds_the_lightest() -> None:
    rule = router("preble_e2", window_s=10.0)
    placed = [rule.choose(request(k, 100, now_us=k), view(hit_blocks=[6, 0])) for k in range(2)]
    assert placed == [0, 1], "0.4 s against nothing: the lightest takes it and a copy"
    late = request(2, 100, now_us=60_000_000)
    assert rule.choose(late, view(hit_blocks=[6, 0])) == 0, "the window has forgotten"


def test_preble_counts_what_it_would_evict() -> None:
    rule = router("preble_e2")
    assert rule.choose(request(0, 100), view(hit_blocks=[9, 9])) in (0, 1)
    full = view(hit_blocks=[0, 0], evictable=[100, 100])
    other = 1 - rule.choose(request(1, 100), view(hit_blocks=[9, 9]))
    full.blocks[:, 0, NEXT], full.blocks[:, 0, ID] = 0, 5  # the queue's front carries a hash
    full.blocks[:, 0, FREED_US] = 0
    assert full.blocks.shape[2] == BLOCK_FIELDS
    full.engine[other, EVICTABLE] = 0  # the other one has room: M is 0 there
    assert rule.choose(request(2, 100), full) == other


def test_mooncake_takes_the_least_estimated_ttft() -> None:
    # wait + prefill: 0.3+1.0, (0.9-0.2)+0.1, 0.5+0.5
    fleet = view(work_us=[300_000, 0, 500_000], until_us=[0, 900_000, 0], running=[0, 1, 0], hit_blocks=[0, 9, 5])
    assert first("mooncake", fleet, request(now_us=200_000)) == 1
    assert first("mooncake", fleet, request(now_us=0)) in (1, 2)  # 1.0 and 1.0
    fleet.work_us[1] = 400_000
    assert first("mooncake", fleet, request(now_us=200_000)) == 2


def test_lmetric_multiplies_tokens_by_batch() -> None:
    # (ahead + new) x (batch + 1): (0+100)*1, (20+40)*2, (30+10)*3 = 100, 120, 120
    fleet = view(new_tokens=[0, 20, 30], waiting=[0, 0, 1], running=[0, 1, 1], hit_blocks=[0, 6, 9])
    assert first("lmetric", fleet) == first("lmetric_prefill", fleet) == 0
    fleet.held[0] = 2  # still transferring: part of the batch where instances decode, nothing where they only prefill
    assert first("lmetric", fleet) in (1, 2) and first("lmetric_prefill", fleet) == 0


def test_lmetric_masks_the_holders_of_a_hot_prefix_once() -> None:
    """Counter-example: nine requests of ten are of one class that one instance of four holds; its product stays the least."""
    rule = router("lmetric")
    holder = view(hit_blocks=[9, 0, 0, 0], new_tokens=[50, 0, 0, 0], waiting=[0, 0, 0, 0])  # 60 against 100
    other = view(hit_blocks=[0, 0, 0, 0])
    assert rule.choose(request(0, head=8), other) >= 0
    chosen = [rule.choose(request(1 + k, head=5), holder) for k in range(4)]
    assert chosen[0] == 0 and chosen[1] != 0 and chosen[2] == 0, "the second in a row finds M masked, and only that one"
    assert rule._memory is not None and rule._memory.counters[NOTICED] == 2


def test_lmetric_lets_a_prefix_be_that_is_not_hot() -> None:
    rule = router("lmetric")
    holder, other = view(hit_blocks=[9, 0, 0, 0]), view(hit_blocks=[0, 0, 0, 0])
    for k in range(8):  # share 1 to 4, and one holder to three others: 1/4 < 1/3
        for j in range(4):
            rule.choose(request(5 * k + j, head=1 + j), other)
        assert rule.choose(request(5 * k + 4, head=0), holder) == 0
    assert rule._memory is not None and rule._memory.counters[NOTICED] == 0


def test_pythia_keeps_clear_of_an_instance_whose_sessions_are_about_to_return() -> None:
    rule = router("pythia")
    at = 0
    for s in range(20):  # every session returns after 1 s with a step of 1 s: learned with certainty
        for turn in (1, 2):
            rule.choose(request(0, 100, session=s, turn=turn, now_us=at), view(hit_blocks=[9, 0]))
            at += 1_000_000
    rule.choose(request(0, 100, session=30, turn=1, now_us=at), view(hit_blocks=[9, 0]))
    assert rule.choose(request(0, 100, now_us=at + 1), view(hit_blocks=[0, 0])) == 1, "instance 0 is equal but for what is to come"
    fresh = [router(name).choose(request(), view(work_us=[5, 3, 4])) for name in ("pythia", "mooncake")]
    assert fresh == [1, 1], "without workflow fields it equals mooncake"


def test_lodestar_learns_which_instance_is_fast() -> None:
    """TTFT is three times the wait: after some rounds the waiting instance is avoided although untried ones are doubted."""
    rule, rng = router("lodestar"), np.random.default_rng(0)
    for k in range(60):
        fleet = view(work_us=rng.integers(0, 3_000_000, 3).tolist())
        i = rule.choose(request(k), fleet)
        rule.served(k, int(3 * fleet.work_us[i]))
    right = 0
    for _ in range(50):
        fleet = view(work_us=rng.integers(0, 3_000_000, 3).tolist())
        right += rule.choose(request(60), fleet) == int(fleet.work_us.argmin())
    assert right >= 48


def warmed(**columns: list[int]) -> Router:
    """kvtide's router after 200 requests, 1 s apart, of prompts that nothing is reused of."""
    rule = router("kvtide")
    for k in range(200):
        rule.choose(request(k % 64, 50, now_us=k * 1_000_000), view(**columns))
    return rule


def test_kvtide_adds_up_seconds() -> None:
    rule = warmed(hit_blocks=[0, 0])
    asked = request(1, 100, now_us=200_000_000)
    assert rule.choose(asked, view(work_us=[300_000, 0], hit_blocks=[8, 0])) == 0
    terms = rule.explain()
    assert [term["wait_s"] for term in terms] == [0.3, 0.0]
    assert [term["prefill_s"] for term in terms] == pytest.approx([0.2, 1.0])
    assert all(term["displaced_s"] == term["copies_s"] == 0.0 for term in terms), "nothing was evicted, so nothing is displaced"
    # No reuse so far: all arrivals are free to go elsewhere, where the wait is nothing; work delays nobody.
    assert all(term["delays_s"] == 0.0 for term in terms)
    assert rule.choose(asked, view(work_us=[900_000, 0], hit_blocks=[8, 0])) == 1, "0.9 + 0.2 against 1.0"


def test_kvtide_prices_the_delay_of_requests_that_are_bound_by_their_kv() -> None:
    rule = warmed(hit_blocks=[4, 0])  # 40 of 50 tokens are hits: 80 % of the prefill time is saved
    rule.choose(request(1, 100, now_us=200_000_000), view(work_us=[300_000, 0], hit_blocks=[8, 0]))
    rate, used, bound = 0.5, 0.1 / 2, 0.8  # one request a second on two instances, 0.1 s each
    per_s = rate * bound / (1 - used)
    free = 0.0  # least wait is nothing
    expected = [0.2 * (per_s * (0.3 + 0.1) + free), 1.0 * (per_s * (0.0 + 0.5) + free)]
    assert [term["delays_s"] for term in rule.explain()] == pytest.approx(expected, rel=0.02)


def test_kvtide_counts_on_what_waits_to_be_stored() -> None:
    rule = router("kvtide")
    chain = np.arange(10, dtype=np.int32)
    home = rule.choose(request(0, 100, chain=chain), view(hit_blocks=[0, 0]))
    queued = view(hit_blocks=[0, 0])
    queued.waiting[home], queued.work_us[home] = 1, 300_000
    assert rule.choose(request(1, 105, chain=chain, now_us=1000), queued) == home, "0.3 s wait + 0.05 s, against 1.05 s"
    begun = view(hit_blocks=[0, 0])
    begun.running[home], begun.until_us[home] = 1, 301_000
    assert rule.choose(request(2, 105, chain=chain, now_us=1000), begun) != home, "nobody waits there, and the caches hold nothing"


def test_kvtide_prices_displaced_reuse_and_copies_alike() -> None:
    """Blocks come back 10 s later throughout; an instance that evicts at 10 s pays for every block it takes in, one with room nothing."""
    rule = router("kvtide")
    for k in range(400):
        chain = np.arange(5 * (k % 10), 5 * (k % 10) + 5, dtype=np.int32)
        rule.choose(request(k % 64, 50, chain=chain, now_us=k * 1_000_000), view(hit_blocks=[0, 0, 0]))
    full = view(hit_blocks=[0, 4, 0], evictable=[100, 0, 100])
    full.blocks[:, 0, NEXT], full.blocks[:, 0, ID], full.blocks[:, 0, FREED_US] = 0, 5, 390_000_000
    rule.choose(request(1, 100, now_us=400_000_000), full)
    term = rule.explain()
    assert term[1]["displaced_s"] == term[1]["copies_s"] == 0.0
    assert term[0]["displaced_s"] > 0 and term[0]["copies_s"] == pytest.approx(term[0]["displaced_s"] * 4 / 6)
    full.blocks[2, 0, FREED_US] = 100_000_000  # that one's front has been idle for 300 s: nobody comes back so late
    rule.choose(request(1, 100, now_us=400_000_000), full)
    assert rule.explain()[2]["displaced_s"] == 0.0


def test_rules_say_what_was_not_read() -> None:
    for name in ROUTERS:
        assert describe(name).endswith((".", ".)")) or ":" in describe(name)
    for name in ("smetric", "pythia", "lodestar"):
        assert "paper was not read" in ROUTERS[name].doc.replace("\n", " ")
    with pytest.raises(ValueError, match="has no parameter"):
        RouterSpec("mooncake", {"w": 0.5}).build(0)
    with pytest.raises(ValueError, match="negative"):
        RouterSpec("lodestar", {"explore": -1.0}).build(0)


# -- shapes ---------------------------------------------------------------------------------------------------------------------------


def conversation_like(seed: int = 1, minutes: float = 30.0) -> Workload:
    chat = TenantSpec("chat", 1, heads=4, head_blocks=2, turns=2, think_s=40, user_tokens=700, user_sigma=0.8, output_tokens=200,
                      max_prompt_tokens=32768)  # fmt: skip
    return generate([chat], minutes=minutes, requests_per_s=3, block_size=128, seed=seed)


def test_random_is_far_worse_than_load_than_local_than_global_awareness() -> None:
    """The order of Mooncake's figure 5, at half of saturation of eight instances, where a router blind to caches is near its own.

    Local-aware: least queue + prefill with the instance's own prefix. Global-aware: one KV for all, which the bound stands for.
    """
    workload = conversation_like()
    names = ["random", "least_load", "mooncake"]
    rows = {row["router"]: row["ttft_mean_s"] for row in router_table({"c": workload}, names, [0.5], [8], [0], bound=True)}
    assert rows["random"] > 2 * rows["least_load"]
    assert rows["least_load"] > 1.5 * rows["mooncake"] and rows["mooncake"] > 1.05 * rows[BOUND]


def test_the_best_weight_of_a_weighted_sum_depends_on_the_load() -> None:
    """Sessions whose KV decides want hits weighed more than load; independent requests that evict each other want less."""
    loads = {
        "sessions": generate(MIXED, minutes=10, requests_per_s=6, block_size=64, seed=3),
        "scattered": generate(LOOPS, minutes=10, requests_per_s=6, block_size=64, seed=3),
    }
    specs = [RouterSpec("weighted_sum", {"w": w}) for w in (0.5, 0.8)]
    found = {(row["workload"], row["router"][-4:-1]): row["ttft_mean_s"] for row in router_table(loads, specs, [0.8], [8], [0])}
    assert found["sessions", "0.8"] < 0.8 * found["sessions", "0.5"]
    assert found["scattered", "0.5"] < 0.98 * found["scattered", "0.8"]


def test_the_table_names_every_cell_and_is_the_same_from_several_processes() -> None:
    loads = {"c": conversation_like(minutes=4.0), "d": conversation_like(seed=2, minutes=4.0)}
    arguments = (loads, ["random", RouterSpec("weighted_sum", {"w": 0.5})], [0.5, 0.9], [2, 4], [0, 1])
    rows = list(router_table(*arguments))
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    keys = {"workload", "router", "instances", "load", "seed", "ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "hit_ratio_tokens", "failed"}
    assert all(set(row) == keys for row in rows)
    assert {row["router"] for row in rows} == {"random", "weighted_sum(w=0.5)"}
    assert rows == list(router_table(*arguments, processes=2))
    with pytest.raises(ValueError, match="unknown router"):
        list(router_table(loads, ["nobody"]))


def test_saturation_is_where_one_common_cache_keeps_all_instances_busy() -> None:
    workload = conversation_like(minutes=6.0)
    config = fleet_for(workload, 4)
    assert config.instances * config.capacity_blocks == pytest.approx(0.2 * len(workload.blocks.hashes), rel=0.01)
    scaled = workload.scale_rate(saturation_factor(workload, config))
    common = replace(config, instances=1, capacity_blocks=4 * config.capacity_blocks)
    assert replay(scaled, common, RouterSpec("random")).prefill_us.sum() / 1e6 == pytest.approx(4 * scaled.span_s, rel=0.01)


def test_jitter_keeps_sessions_in_order_and_every_chain() -> None:
    workload = conversation_like(minutes=4.0)
    moved = jittered(workload, 3)
    assert sorted(moved.prompt_tokens.tolist()) == sorted(workload.prompt_tokens.tolist())
    assert not np.array_equal(moved.arrived_at_us, workload.arrived_at_us)
    assert np.array_equal(jittered(workload, 3).arrived_at_us, moved.arrived_at_us)
    assert moved.turn is not None
    for s in range(len(workload.sessions)):
        assert np.all(np.diff(moved.turn[moved.session == s]) > 0)


def test_the_bound_is_a_central_queue() -> None:
    """Three prompts of 1 s at once on two instances: waits 0, 0, 1 s."""
    workload = Workload(
        arrived_at_us=np.zeros(3, np.int64), tenant=np.zeros(3, np.int32), tenants=("a",), prompt_tokens=np.full(3, 100, np.int64),
        output_tokens=np.ones(3, np.int64), block_size=10, offsets=np.zeros(4, np.int64), hashes=np.zeros(0, np.uint64),
        session=np.full(3, -1, np.int32),
    )  # fmt: skip
    bound = shared_kv_bound(workload, FleetConfig(instances=2, capacity_blocks=100, cost_a_s=0.01, cost_b_s=0.0))
    assert bound.queue_us.tolist() == [0, 0, 1_000_000] and bound.ttft_us.tolist() == [1_000_000, 1_000_000, 2_000_000]


# -- the experiment's arithmetic ------------------------------------------------------------------------------------------------------


def row(router: str, p99: float, mean: float, *, seed: int = 0, workload: str = "a") -> dict[str, object]:
    return {"workload": workload, "router": router, "instances": 4, "load": 0.8, "seed": seed, "ttft_p50_s": mean, "ttft_p99_s": p99,
            "ttft_mean_s": mean, "hit_ratio_tokens": 0.5}  # fmt: skip


def test_summary_hides_no_cell() -> None:
    rows = []
    for seed in (0, 1):
        for workload, kvtide, x, y in (("a", 4.0, 8.0, 16.0), ("b", 3.0, 2.0, 9.0)):
            rows += [row("kvtide", kvtide, kvtide / 2, seed=seed, workload=workload), row(BOUND, 1.0, 0.5, seed=seed, workload=workload)]
            rows += [row("x", x, x / 2, seed=seed, workload=workload), row("y", y, y / 2, seed=seed, workload=workload)]
            rows += [row(RouterSpec("weighted_sum", {"w": w}).label, 50.0, 30.0 - 10 * w, seed=seed, workload=workload) for w in WEIGHTS]
    found = summary(rows)
    single = found["best_single"]
    assert single["router"] == "x" and single["ttft_p99_s_mean_ratio"] == pytest.approx(7 / 10)
    assert single["ttft_p99_s_mean_ratio_95"] == pytest.approx([0.7, 0.7]), "equal seeds leave no doubt"
    assert single["ttft_p99_s_geometric_ratio"] == pytest.approx((0.5 * 1.5) ** 0.5)
    assert single["worse_cells"] == [f"b n=4 load=0.8 {figure}: 1.50 x x" for figure in ("ttft_p99_s", "ttft_mean_s")]
    assert found["best_of_all"]["bound_ttft_p99_s_geometric_ratio"] == pytest.approx((1 / 8 * 1 / 2) ** 0.5)
    assert found["best_w"] == {"a": "weighted_sum(w=0.9)", "b": "weighted_sum(w=0.9)"}


def test_coarser_blocks_hold_the_last_hash_of_each_run() -> None:
    workload = conversation_like(minutes=2.0)
    coarse = coarser(workload, 4)
    for k in range(0, len(workload), 7):
        assert coarse.chain(k).tolist() == workload.chain(k)[3::4].tolist()
    assert coarse.block_size == 512


def test_lab_bench_says_what_it_compared(tmp_path: Path) -> None:
    lines = [{"timestamp": 300 * k, "input_length": 512 * 3 + 9, "output_length": 5, "hash_ids": [k % 3, 10 + k % 5, 100 + k, 1000 + k]}
             for k in range(60)]  # fmt: skip
    path = tmp_path / "tiny.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    got = fleet_replay(str(path), goes=1)
    assert got["requests"] == 60 and got["same_as_emulator"] and set(got["requests_per_second"]) == set(ROUTERS)
    assert got["least_requests_per_second"] == min(got["requests_per_second"].values())
    with pytest.raises(UsageError, match="not there"):
        fleet_replay(str(tmp_path / "none.jsonl"))
