-- Stack-distance histograms of each tenant, over the fleet and as placed on each instance: the capacity curves of a report.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    tenant,
    scope,
    instance,
    kind,
    toFloat64(distance_to) AS distance_to,
    toFloat64(sum(r.blocks)) AS blocks,
    toFloat64(sum(r.blocks * r.block_size)) AS tokens
FROM reuse_1m AS r
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY tenant, scope, instance, kind, distance_to
ORDER BY tenant, scope, instance, kind, distance_to
