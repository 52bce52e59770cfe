-- Blocks stored, and evicted under pressure by whose allocation, by minute and tenant: who fills the caches.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toInt64(toUnixTimestamp(window_start)) AS window_s,
    tenant,
    kind,
    cause_tenant,
    toInt64(sum(r.blocks)) AS blocks
FROM residency_1m AS r
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    AND (kind = 'stored' OR (kind = 'evicted' AND reason = 'pressure'))
GROUP BY window_s, tenant, kind, cause_tenant
ORDER BY window_s, tenant, kind, cause_tenant
