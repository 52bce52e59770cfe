-- Where every prompt token went, by minute, tenant, instance and cause: the identity's terms (hit is one of the causes).
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toInt64(toUnixTimestamp(window_start)) AS window_s,
    tenant,
    instance,
    cause,
    cause_tenant,
    toInt64(sum(c.tokens)) AS tokens,
    sum(c.token_context) AS token_context
FROM cause_1m AS c
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY window_s, tenant, instance, cause, cause_tenant
ORDER BY window_s, tenant, instance, cause, cause_tenant
