-- One-minute windows of event time, written once each by the shard that owns the tenant. All columns after the keys are sums.

-- category '' is unknown. *_us are sums over the *_known requests that had the value.
CREATE TABLE IF NOT EXISTS traffic_1m
(
    window_start DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    instance LowCardinality(String),
    category LowCardinality(String),
    requests UInt64,
    failed_requests UInt64,
    late_requests UInt64,
    prompt_tokens UInt64,
    hit_tokens UInt64,
    output_tokens UInt64,
    queue_us UInt64,
    queue_known UInt64,
    prefill_us UInt64,
    prefill_known UInt64,
    ttft_us UInt64,
    ttft_known UInt64
)
ENGINE = MergeTree
ORDER BY (tenant, model, window_start, instance, category)
SETTINGS non_replicated_deduplication_window = 100000;

-- Where every prompt token went. 'hit' is one of the causes, so that sum(tokens) = prompt_tokens of traffic_1m.
-- token_context: tokens times the mean number of tokens before them; prefill seconds = a*tokens + b*token_context.
CREATE TABLE IF NOT EXISTS cause_1m
(
    window_start DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    instance LowCardinality(String),
    cause LowCardinality(String),
    cause_tenant LowCardinality(String),
    inferred UInt8,
    requests UInt64,
    blocks UInt64,
    tokens UInt64,
    token_context Float64 CODEC(ZSTD(1))
)
ENGINE = MergeTree
ORDER BY (tenant, model, window_start, instance, cause, cause_tenant)
SETTINGS non_replicated_deduplication_window = 100000;

-- Stack distances. scope 'fleet' has instance ''; kind 'reuse' has a bin [distance_from, distance_to) in blocks, 'cold' and 'beyond' none.
-- positions: sum of the blocks' positions; tokens = blocks*block_size, token_context = block_size^2 * (positions + blocks/2).
CREATE TABLE IF NOT EXISTS reuse_1m
(
    window_start DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    block_size UInt32,
    scope LowCardinality(String),
    instance LowCardinality(String),
    kind LowCardinality(String),
    distance_from UInt64,
    distance_to UInt64,
    blocks UInt64,
    positions UInt64
)
ENGINE = MergeTree
ORDER BY (tenant, model, scope, window_start, instance, kind, distance_from)
SETTINGS non_replicated_deduplication_window = 100000;

-- Reuse times on the instance that served, which compose over tenants as stack distances do not. Bins [reuse_ms_from, reuse_ms_to).
CREATE TABLE IF NOT EXISTS reuse_time_1m
(
    window_start DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    block_size UInt32,
    instance LowCardinality(String),
    category LowCardinality(String),
    kind LowCardinality(String),
    reuse_ms_from UInt64,
    reuse_ms_to UInt64,
    blocks UInt64,
    positions UInt64
)
ENGINE = MergeTree
ORDER BY (tenant, model, window_start, instance, category, kind, reuse_ms_from)
SETTINGS non_replicated_deduplication_window = 100000;

-- Blocks stored and removed. idle_ms is a sum over the idle_known blocks whose age since last use was reported.
CREATE TABLE IF NOT EXISTS residency_1m
(
    window_start DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    instance LowCardinality(String),
    kind LowCardinality(String),
    reason LowCardinality(String),
    cause_tenant LowCardinality(String),
    blocks UInt64,
    idle_ms UInt64,
    idle_known UInt64
)
ENGINE = MergeTree
ORDER BY (tenant, model, window_start, instance, kind, reason, cause_tenant)
SETTINGS non_replicated_deduplication_window = 100000;
