-- State of a shard as of next_offset, compressed and cut into chunks; only the newest one is ever read, so merges drop the others.
CREATE TABLE IF NOT EXISTS shard_state
(
    topic LowCardinality(String),
    partition UInt16,
    next_offset UInt64,
    chunk UInt32,
    chunks UInt32,
    state String CODEC(NONE),
    written_at DateTime64(6, 'UTC') DEFAULT now64(6)
)
ENGINE = ReplacingMergeTree(next_offset)
ORDER BY (topic, partition, chunk)
SETTINGS non_replicated_deduplication_window = 100000;

-- tenant '' is the fleet. contributions: what each cause added to the hit ratio, in percentage points; they sum to the whole change.
CREATE TABLE IF NOT EXISTS diagnosis
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    baseline_from DateTime('UTC'),
    baseline_to DateTime('UTC'),
    current_from DateTime('UTC'),
    current_to DateTime('UTC'),
    verdict LowCardinality(String),
    target String,
    hit_ratio_before Float64,
    hit_ratio_after Float64,
    contributions Map(String, Float64),
    evidence String CODEC(ZSTD(3))
)
ENGINE = MergeTree
ORDER BY (tenant, made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;

-- predicted and evidence are JSON objects; the advice does not hold after expires_at.
CREATE TABLE IF NOT EXISTS advice
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    kind LowCardinality(String),
    target String,
    predicted String CODEC(ZSTD(3)),
    confidence Float64,
    expires_at DateTime64(6, 'UTC'),
    evidence String CODEC(ZSTD(3)),
    status LowCardinality(String)
)
ENGINE = MergeTree
ORDER BY (made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;
