-- What an LRU of each capacity would have served, in blocks, tokens or seconds of prefill. Each view holds its own sums: a view with
-- parameters that reads another one finds it in the reader's current database only, and none where that is another.

-- Hit ratio of one cache for all of a tenant's requests, exact at every capacity listed: an LRU of c blocks hits iff distance < c, so
-- bins with distance_to <= c hit. Cold and beyond blocks stand in the denominator; they are the point at 0. Touches deeper than a shard
-- keeps its stack read beyond, so from that depth on (docs/design.md section 4) the curve is a lower bound. Tokens and seconds are shares of
-- the model's whole prompts, tails shorter than a block and requests that were not served included.
-- weight 'cost' is seconds of prefill at 200 us a token and 20 ns a token of context, by each block's position (capacity_value takes your
-- model's cost). Only their ratio moves hit_ratio.
-- Use: SELECT * FROM mrc(tenant = 'a', from = '2023-01-01 00:00:00', to = '2023-01-02 00:00:00', weight = 'tokens')
CREATE OR REPLACE VIEW mrc AS
SELECT
    model,
    block_size,
    capacity_blocks,
    sum(bins.hit) OVER (PARTITION BY model, block_size ORDER BY capacity_blocks ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS hits,
    greatest(sum(bins.touched) OVER (PARTITION BY model, block_size), ifNull(prompts.amount, 0)) AS asked,
    hits / nullIf(asked, 0) AS hit_ratio
FROM
(
    SELECT
        model,
        block_size,
        if(kind = 'reuse', distance_to, 0) AS capacity_blocks,
        sumIf(amount, kind = 'reuse') AS hit,
        sum(amount) AS touched
    FROM
    (
        SELECT
            model,
            block_size,
            kind,
            distance_to,
            toFloat64(blocks) AS n,
            {weight:Enum8('blocks' = 1, 'tokens' = 2, 'cost' = 3)} AS unit,
            multiIf(
                unit = 'blocks', n,
                unit = 'tokens', n * block_size,
                2e-4 * n * block_size + 2e-8 * pow(block_size, 2) * (positions + n / 2)) AS amount
        FROM reuse_1m
        WHERE tenant = {tenant:String} AND scope = 'fleet'
            AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    )
    GROUP BY model, block_size, capacity_blocks
) AS bins
LEFT JOIN
(
    SELECT
        model,
        {weight:Enum8('blocks' = 1, 'tokens' = 2, 'cost' = 3)} AS unit,
        multiIf(
            unit = 'blocks', 0,
            unit = 'tokens', toFloat64(sum(tokens)),
            2e-4 * sum(tokens) + 2e-8 * sum(token_context)) AS amount
    FROM cause_1m
    WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY model
) AS prompts USING (model)
ORDER BY model, block_size, capacity_blocks;

-- The same as the router placed the requests: one curve for each instance, of the accesses that came to it.
-- Use: SELECT * FROM mrc_placed(tenant = 'a', from = '2023-01-01 00:00:00', to = '2023-01-02 00:00:00', weight = 'tokens')
CREATE OR REPLACE VIEW mrc_placed AS
SELECT
    model,
    block_size,
    instance,
    capacity_blocks,
    sum(bins.hit) OVER (PARTITION BY model, block_size, instance ORDER BY capacity_blocks ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
        AS hits,
    greatest(sum(bins.touched) OVER (PARTITION BY model, block_size, instance), ifNull(prompts.amount, 0)) AS asked,
    hits / nullIf(asked, 0) AS hit_ratio
FROM
(
    SELECT
        model,
        block_size,
        instance,
        if(kind = 'reuse', distance_to, 0) AS capacity_blocks,
        sumIf(amount, kind = 'reuse') AS hit,
        sum(amount) AS touched
    FROM
    (
        SELECT
            model,
            block_size,
            instance,
            kind,
            distance_to,
            toFloat64(blocks) AS n,
            {weight:Enum8('blocks' = 1, 'tokens' = 2, 'cost' = 3)} AS unit,
            multiIf(
                unit = 'blocks', n,
                unit = 'tokens', n * block_size,
                2e-4 * n * block_size + 2e-8 * pow(block_size, 2) * (positions + n / 2)) AS amount
        FROM reuse_1m
        WHERE tenant = {tenant:String} AND scope = 'placed'
            AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    )
    GROUP BY model, block_size, instance, capacity_blocks
) AS bins
LEFT JOIN
(
    SELECT
        model,
        instance,
        {weight:Enum8('blocks' = 1, 'tokens' = 2, 'cost' = 3)} AS unit,
        multiIf(
            unit = 'blocks', 0,
            unit = 'tokens', toFloat64(sum(tokens)),
            2e-4 * sum(tokens) + 2e-8 * sum(token_context)) AS amount
    FROM cause_1m
    WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY model, instance
) AS prompts USING (model, instance)
ORDER BY model, block_size, instance, capacity_blocks;

-- What more capacity saves, in seconds of prefill over the range asked for: one row per capacity at which the tenant's curve bends.
-- a_s and b_s are the prefill cost (seconds per token, per token squared), block_bytes the KV of one block; value_s_per_gib is the saving
-- per further GiB on the way from the row before to this one. scope 'placed' has a curve for each instance, 'fleet' one with instance ''.
-- Use: SELECT * FROM capacity_value(tenant = 'a', from = '2023-01-01 00:00:00', to = '2023-01-02 00:00:00', scope = 'fleet',
--                                   a_s = 0.0002, b_s = 0.00000002, block_bytes = 2097152)
CREATE OR REPLACE VIEW capacity_value AS
SELECT
    model,
    block_size,
    instance,
    capacity_blocks,
    sum(bins.hit_blocks) OVER up_to / nullIf(sum(bins.blocks) OVER whole, 0) AS hit_ratio_blocks,
    sum(bins.hit_s) OVER up_to AS saved_s,
    saved_s / nullIf(greatest(sum(bins.touched_s) OVER whole, ifNull(prompts.prefill_s, 0)), 0) AS hit_ratio_cost,
    bins.hit_s
        / nullIf((toInt64(capacity_blocks) - lagInFrame(toInt64(capacity_blocks), 1, 0) OVER up_to) * {block_bytes:Float64} / pow(2, 30), 0)
        AS value_s_per_gib
FROM
(
    SELECT
        model,
        block_size,
        instance,
        if(kind = 'reuse', distance_to, 0) AS capacity_blocks,
        sumIf(n, kind = 'reuse') AS hit_blocks,
        sum(n) AS blocks,
        sumIf(prefill_s, kind = 'reuse') AS hit_s,
        sum(prefill_s) AS touched_s
    FROM
    (
        SELECT
            model,
            block_size,
            instance,
            kind,
            distance_to,
            toFloat64(r.blocks) AS n,
            {a_s:Float64} * n * block_size + {b_s:Float64} * pow(block_size, 2) * (positions + n / 2) AS prefill_s
        FROM reuse_1m AS r
        WHERE tenant = {tenant:String} AND scope = toString({scope:Enum8('fleet' = 1, 'placed' = 2)})
            AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    )
    GROUP BY model, block_size, instance, capacity_blocks
) AS bins
LEFT JOIN
(
    SELECT
        model,
        if({scope:Enum8('fleet' = 1, 'placed' = 2)} = 'placed', c.instance, '') AS instance,
        {a_s:Float64} * sum(tokens) + {b_s:Float64} * sum(token_context) AS prefill_s
    FROM cause_1m AS c
    WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY model, instance
) AS prompts USING (model, instance)
WINDOW
    up_to AS (PARTITION BY model, block_size, instance ORDER BY capacity_blocks ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW),
    whole AS (PARTITION BY model, block_size, instance)
ORDER BY model, block_size, instance, capacity_blocks;
