-- What more capacity saves, in seconds of prefill over the range asked for: one row per capacity at which the tenant's curve bends.
-- a_s and b_s are the prefill cost (seconds per token, per token squared), block_bytes the KV of one block; value_s_per_gib is the saving
-- per further GiB on the way from the row before to this one.
-- Use: SELECT * FROM capacity_value(tenant = 'a', from = '2023-01-01 00:00:00', to = '2023-01-02 00:00:00', scope = 'fleet',
--                                   a_s = 0.0002, b_s = 0.00000002, block_bytes = 2097152)
CREATE OR REPLACE VIEW capacity_value AS
SELECT
    model,
    block_size,
    instance,
    capacity_blocks,
    hit_ratio_blocks,
    {a_s:Float64} * hit_blocks * block_size + {b_s:Float64} * pow(block_size, 2) * (hit_positions + hit_blocks / 2) AS saved_s,
    (saved_s - lagInFrame(saved_s, 1, 0) OVER rising)
        / nullIf((toInt64(capacity_blocks) - lagInFrame(toInt64(capacity_blocks), 1, 0) OVER rising) * {block_bytes:Float64} / pow(2, 30), 0)
        AS value_s_per_gib
FROM mrc(tenant = {tenant:String}, from = {from:DateTime('UTC')}, to = {to:DateTime('UTC')}, scope = {scope:String})
WINDOW rising AS (PARTITION BY model, block_size, instance ORDER BY capacity_blocks ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
ORDER BY model, block_size, instance, capacity_blocks;

-- Mean working set of a tenant: distinct blocks that it touches within time_s, at every reuse time at which that bends, summed over the
-- instances that served it, and the share of its blocks that come again within that time (Denning and Schwartz 1972).
-- The duration is from the tenant's first to its last minute in the range.
CREATE OR REPLACE VIEW working_set AS
SELECT
    to_ms / 1000 AS time_s,
    (sum(blocks * (from_ms + to_ms) / 2) OVER up_to + to_ms * (all_blocks - sum(blocks) OVER up_to)) / 1000 / duration_s AS working_set_blocks,
    sum(blocks) OVER up_to / all_blocks AS reused_ratio
FROM
(
    SELECT
        reuse_ms_from AS from_ms,
        reuse_ms_to AS to_ms,
        toFloat64(sum(r.blocks)) AS blocks,
        any(whole.blocks) AS all_blocks,
        any(whole.duration_s) AS duration_s
    FROM reuse_time_1m AS r
    CROSS JOIN
    (
        SELECT
            toFloat64(sum(w.blocks)) AS blocks,
            toFloat64(max(window_start)) - toFloat64(min(window_start)) + 60 AS duration_s
        FROM reuse_time_1m AS w
        WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    ) AS whole
    WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')} AND kind = 'reuse'
    GROUP BY from_ms, to_ms
)
WINDOW up_to AS (ORDER BY to_ms ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
ORDER BY time_s;

-- The curve of one instance's LRU as its tenants share it, composed from their reuse times (AET): at characteristic time time_s the cache
-- would hold capacity_blocks, tenant_blocks of them the tenant's, and the tenant would hit hit_ratio_blocks of its blocks.
CREATE OR REPLACE VIEW pooled_curve AS
SELECT
    edge_ms / 1000 AS time_s,
    sum(held) OVER (PARTITION BY edge_ms) AS capacity_blocks,
    tenant,
    held AS tenant_blocks,
    hit_ratio_blocks
FROM
(
    SELECT
        edges.edge_ms AS edge_ms,
        tenant,
        sum(bins.blocks * multiIf(bins.kind != 'reuse', edge_ms, bins.to_ms <= edge_ms, (bins.from_ms + bins.to_ms) / 2, edge_ms))
            / 1000 / any(bins.duration_s) AS held,
        sumIf(bins.blocks, bins.kind = 'reuse' AND bins.to_ms <= edge_ms) / sum(bins.blocks) AS hit_ratio_blocks
    FROM
    (
        SELECT
            tenant,
            kind,
            reuse_ms_from AS from_ms,
            reuse_ms_to AS to_ms,
            toFloat64(sum(r.blocks)) AS blocks,
            any(whole.duration_s) AS duration_s
        FROM reuse_time_1m AS r
        CROSS JOIN
        (
            SELECT toFloat64(max(window_start)) - toFloat64(min(window_start)) + 60 AS duration_s
            FROM reuse_time_1m
            WHERE instance = {instance:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
        ) AS whole
        WHERE instance = {instance:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
        GROUP BY tenant, kind, from_ms, to_ms
    ) AS bins
    CROSS JOIN
    (
        SELECT DISTINCT reuse_ms_to AS edge_ms
        FROM reuse_time_1m
        WHERE instance = {instance:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')} AND kind = 'reuse'
    ) AS edges
    GROUP BY edge_ms, tenant
)
ORDER BY time_s, tenant;
