-- Spread of prefill time and TTFT of the served requests over a range of time: what the queue formula needs beside means.
-- :from = '1970-01-01 00:00:00'  first moment
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toInt64(count(prefill_ms)) AS requests,
    ifNull(avg(prefill_ms), 0) / 1000 AS prefill_mean_s,
    ifNull(stddevPop(prefill_ms), 0) / 1000 AS prefill_sd_s,
    ifNull(quantileExact(0.99)(prefill_ms), 0) / 1000 AS prefill_p99_s,
    ifNull(quantileExact(0.99)(ttft_ms), 0) / 1000 AS ttft_p99_s
FROM access_raw
WHERE ts >= {from:DateTime('UTC')} AND ts < {to:DateTime('UTC')} AND outcome = 'served'
