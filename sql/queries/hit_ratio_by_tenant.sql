-- Hit ratio of each tenant over a range of time, largest tenants first.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    tenant,
    sum(h.requests) AS requests,
    sum(h.prompt_tokens) AS prompt_tokens,
    sum(h.hit_tokens) AS hit_tokens,
    if(prompt_tokens = 0, NULL, hit_tokens / prompt_tokens) AS hit_ratio
FROM hit_ratio AS h
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY tenant
ORDER BY prompt_tokens DESC, tenant
