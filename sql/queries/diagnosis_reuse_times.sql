-- Reuse times of each tenant on each instance by minute, which compose into a shared pool (AET).
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toInt64(toUnixTimestamp(window_start)) AS window_s,
    tenant,
    instance,
    kind,
    toFloat64(reuse_ms_from) AS from_ms,
    toFloat64(reuse_ms_to) AS to_ms,
    toFloat64(sum(r.blocks)) AS blocks
FROM reuse_time_1m AS r
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY window_s, tenant, instance, kind, from_ms, to_ms
ORDER BY window_s, tenant, instance, kind, from_ms
