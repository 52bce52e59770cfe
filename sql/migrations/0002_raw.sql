-- Facts as they came. Their TTL goes by inserted_at, never by ts: a replayed trace may be years old.
-- No PARTITION BY: a block's deduplication is per partition, so one by inserted_at would let a retry after midnight in twice,
-- and one by ts would cut a replay into many parts.

-- One row per prefill request. Ordered by tenant, session and time so that the repeated head of a session's chains compresses away.
-- causes: cause -> tokens, without hit; hit_tokens + sum of causes = prompt_tokens.
CREATE TABLE IF NOT EXISTS access_raw
(
    ts DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    instance LowCardinality(String),
    incarnation UInt64 CODEC(ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    session Nullable(String) CODEC(ZSTD(1)),
    parent_session Nullable(String) CODEC(ZSTD(1)),
    category LowCardinality(Nullable(String)),
    turn Nullable(Int32),
    prompt_tokens UInt64 CODEC(ZSTD(1)),
    hit_tokens UInt64 CODEC(ZSTD(1)),
    hit_dram_tokens Nullable(UInt64),
    hit_disk_tokens Nullable(UInt64),
    block_size UInt32 CODEC(ZSTD(1)),
    chain Array(UInt64) CODEC(ZSTD(3)),
    output_tokens Nullable(UInt64),
    queue_ms Nullable(Float64) CODEC(ZSTD(1)),
    prefill_ms Nullable(Float64) CODEC(ZSTD(1)),
    ttft_ms Nullable(Float64) CODEC(ZSTD(1)),
    router LowCardinality(Nullable(String)),
    outcome LowCardinality(String),
    late UInt8,
    causes Map(LowCardinality(String), UInt64),
    partition UInt16,
    offset UInt64 CODEC(Delta, ZSTD(1)),
    source LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    inserted_at DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = MergeTree
ORDER BY (tenant, ifNull(session, ''), ts)
TTL inserted_at + INTERVAL 14 DAY
SETTINGS non_replicated_deduplication_window = 100000;

-- Lifecycle changes and heartbeats of instances. hit_tokens and query_tokens are cumulative within an incarnation.
CREATE TABLE IF NOT EXISTS instance_raw
(
    ts DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    instance LowCardinality(String),
    incarnation UInt64 CODEC(ZSTD(1)),
    lifecycle LowCardinality(String),
    reason LowCardinality(Nullable(String)),
    capacity_blocks Nullable(UInt64),
    used_blocks Nullable(UInt64),
    pinned_blocks Nullable(UInt64),
    evictable_blocks Nullable(UInt64),
    running Nullable(UInt32),
    waiting Nullable(UInt32),
    queued_tokens Nullable(UInt64),
    query_tokens Nullable(UInt64),
    hit_tokens Nullable(UInt64),
    source_state LowCardinality(String),
    reports_residency UInt8,
    source LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    partition UInt16,
    offset UInt64 CODEC(Delta, ZSTD(1)),
    inserted_at DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = MergeTree
ORDER BY (instance, ts)
TTL inserted_at + INTERVAL 14 DAY
SETTINGS non_replicated_deduplication_window = 100000;

-- What could not be read, with its reason and bytes.
CREATE TABLE IF NOT EXISTS dead_letter_raw
(
    at DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    topic LowCardinality(String),
    partition UInt16,
    offset UInt64 CODEC(Delta, ZSTD(1)),
    reason LowCardinality(String),
    detail String CODEC(ZSTD(1)),
    raw String CODEC(ZSTD(3)),
    inserted_at DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = MergeTree
ORDER BY (topic, partition, offset)
TTL inserted_at + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 100000;
