-- Who evicts whom under pressure: victim tenant by allocating tenant; share_ratio is of the victim's evictions.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    tenant,
    cause_tenant,
    sum(r.blocks) AS evicted_blocks,
    if(sum(r.idle_known) = 0, NULL, sum(r.idle_ms) / sum(r.idle_known) / 1000) AS idle_s,
    evicted_blocks / sum(evicted_blocks) OVER (PARTITION BY tenant) AS share_ratio
FROM residency_1m AS r
WHERE kind = 'evicted' AND reason = 'pressure'
    AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY tenant, cause_tenant
ORDER BY tenant, evicted_blocks DESC, cause_tenant
