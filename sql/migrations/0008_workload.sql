-- What `kvtide analyze --store` found of a trace, one figure a row. tenant '' is the whole trace. value is NULL where the trace cannot tell,
-- and reason then says why; it is never 0 for that.
CREATE TABLE IF NOT EXISTS workload_profile
(
    id String,
    made_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    trace String,
    format LowCardinality(String),
    tenant LowCardinality(String),
    metric LowCardinality(String),
    label LowCardinality(String),
    value Nullable(Float64),
    unit LowCardinality(String),
    reason LowCardinality(String)
)
ENGINE = MergeTree
ORDER BY (trace, tenant, metric, label, made_at, id)
SETTINGS non_replicated_deduplication_window = 100000;
