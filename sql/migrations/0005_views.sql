-- Hit ratio of each tenant, by minute.
CREATE OR REPLACE VIEW hit_ratio AS
SELECT
    window_start,
    tenant,
    sum(t.requests) AS requests,
    sum(t.prompt_tokens) AS prompt_tokens,
    sum(t.hit_tokens) AS hit_tokens,
    if(prompt_tokens = 0, NULL, hit_tokens / prompt_tokens) AS hit_ratio
FROM traffic_1m AS t
GROUP BY window_start, tenant;

-- Hit ratio of each instance, by minute.
CREATE OR REPLACE VIEW hit_ratio_instance AS
SELECT
    window_start,
    instance,
    sum(t.requests) AS requests,
    sum(t.prompt_tokens) AS prompt_tokens,
    sum(t.hit_tokens) AS hit_tokens,
    if(prompt_tokens = 0, NULL, hit_tokens / prompt_tokens) AS hit_ratio
FROM traffic_1m AS t
GROUP BY window_start, instance;

-- Why prompt tokens were computed, by tenant and minute. share_ratio is of that tenant's prompt tokens in that minute,
-- so the shares of a tenant-minute add up to 1 - hit ratio.
CREATE OR REPLACE VIEW miss_cause AS
SELECT window_start, tenant, cause, cause_tenant, tokens, if(prompt_tokens = 0, NULL, tokens / prompt_tokens) AS share_ratio
FROM
(
    SELECT
        window_start,
        tenant,
        cause,
        cause_tenant,
        sum(c.tokens) AS tokens,
        sum(tokens) OVER (PARTITION BY window_start, tenant) AS prompt_tokens
    FROM cause_1m AS c
    GROUP BY window_start, tenant, cause, cause_tenant
)
WHERE cause != 'hit';

-- Whose allocations evict whose blocks under pressure. tenant is the victim, cause_tenant the one that allocated ('' unknown, or itself).
-- idle_s: how long the evicted blocks had not been used, on average; share_ratio is of the victim's evictions on that instance in that minute.
CREATE OR REPLACE VIEW interference AS
SELECT
    window_start,
    instance,
    tenant,
    cause_tenant,
    sum(r.blocks) AS evicted_blocks,
    if(sum(r.idle_known) = 0, NULL, sum(r.idle_ms) / sum(r.idle_known) / 1000) AS idle_s,
    evicted_blocks / sum(evicted_blocks) OVER (PARTITION BY window_start, instance, tenant) AS share_ratio
FROM residency_1m AS r
WHERE kind = 'evicted' AND reason = 'pressure'
GROUP BY window_start, instance, tenant, cause_tenant;

-- Hit ratio against capacity, exact at the bin edges: an LRU of c blocks hits iff distance < c, so bins with distance_to <= c hit.
-- One curve per model, block size and, in scope 'placed', instance. Cold and beyond blocks stand in the denominator; they are the point at 0.
-- hit_ratio_tokens is of all prompt tokens of the model (tails shorter than a block included) where traffic_1m has them.
-- Use: SELECT * FROM mrc(tenant = 'a', from = '2023-01-01 00:00:00', to = '2023-01-02 00:00:00', scope = 'fleet')
CREATE OR REPLACE VIEW mrc AS
SELECT
    model,
    block_size,
    instance,
    capacity_blocks,
    sum(bin_blocks) OVER up_to AS hit_blocks,
    sum(bin_positions) OVER up_to AS hit_positions,
    sum(all_blocks) OVER whole AS blocks,
    sum(all_positions) OVER whole AS positions,
    if(blocks = 0, NULL, hit_blocks / blocks) AS hit_ratio_blocks,
    greatest(blocks * block_size, prompt.tokens) AS prompt_tokens,
    if(prompt_tokens = 0, NULL, hit_blocks * block_size / prompt_tokens) AS hit_ratio_tokens
FROM
(
    SELECT
        model,
        block_size,
        instance,
        if(kind = 'reuse', distance_to, 0) AS capacity_blocks,
        sumIf(r.blocks, kind = 'reuse') AS bin_blocks,
        sumIf(r.positions, kind = 'reuse') AS bin_positions,
        sum(r.blocks) AS all_blocks,
        sum(r.positions) AS all_positions
    FROM reuse_1m AS r
    WHERE tenant = {tenant:String} AND scope = {scope:String}
        AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY model, block_size, instance, capacity_blocks
) AS bins
LEFT JOIN
(
    SELECT model, if({scope:String} = 'placed', t.instance, '') AS instance, sum(t.prompt_tokens) AS tokens
    FROM traffic_1m AS t
    WHERE tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY model, instance
) AS prompt USING (model, instance)
WINDOW
    up_to AS (PARTITION BY model, block_size, instance ORDER BY capacity_blocks ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW),
    whole AS (PARTITION BY model, block_size, instance)
ORDER BY model, block_size, instance, capacity_blocks;
