-- Where the prompt tokens of every minute went, hits included: the shares of a minute add up to 1.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :tenant = ''  one tenant; empty means the fleet
SELECT
    window_start,
    cause,
    sum(c.tokens) AS tokens,
    tokens / sum(tokens) OVER (PARTITION BY window_start) AS share_ratio
FROM cause_1m AS c
WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    AND ({tenant:String} = '' OR tenant = {tenant:String})
GROUP BY window_start, cause
ORDER BY window_start, cause
