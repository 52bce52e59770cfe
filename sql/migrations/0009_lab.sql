-- What `kvtide lab --store` measured: one row a cell. id names the run of the command; a run repeats cells that an earlier one finished.
CREATE TABLE IF NOT EXISTS lab_policy
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    trace LowCardinality(String),
    policy LowCardinality(String),
    form LowCardinality(String),
    capacity_blocks UInt64,
    hit_ratio_blocks Float64,
    hit_ratio_tokens Float64,
    saved_prefill_s Float64
)
ENGINE = MergeTree
ORDER BY (trace, form, capacity_blocks, policy, made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;

CREATE TABLE IF NOT EXISTS lab_router
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    workload LowCardinality(String),
    router LowCardinality(String),
    instances UInt32,
    load Float64,
    seed Int64,
    ttft_p50_s Float64,
    ttft_p99_s Float64,
    ttft_mean_s Float64,
    hit_ratio_tokens Float64
)
ENGINE = MergeTree
ORDER BY (workload, instances, load, router, seed, made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;

CREATE TABLE IF NOT EXISTS lab_tier
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    trace LowCardinality(String),
    hbm_blocks UInt64,
    dram_blocks UInt64,
    hbm_hit_ratio_tokens Float64,
    dram_hit_ratio_tokens Float64,
    hit_ratio_tokens Float64,
    saved_prefill_s Float64
)
ENGINE = MergeTree
ORDER BY (trace, hbm_blocks, dram_blocks, made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;
