-- Load, hit ratio and times of each tenant on each instance by minute: what the detector sees.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toInt64(toUnixTimestamp(window_start)) AS window_s,
    tenant,
    instance,
    toInt64(sum(t.requests)) AS requests,
    toInt64(sum(t.prompt_tokens)) AS prompt_tokens,
    toInt64(sum(t.hit_tokens)) AS hit_tokens,
    sum(t.queue_us) / 1e6 AS queue_s,
    toInt64(sum(t.queue_known)) AS queue_known,
    sum(t.prefill_us) / 1e6 AS prefill_s,
    toInt64(sum(t.prefill_known)) AS prefill_known,
    sum(t.ttft_us) / 1e6 AS ttft_s,
    toInt64(sum(t.ttft_known)) AS ttft_known
FROM traffic_1m AS t
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
GROUP BY window_s, tenant, instance
ORDER BY window_s, tenant, instance
