-- The causes that cost most computed prompt tokens, by tenant; share_ratio is of the fleet's prompt tokens.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :limit = 20  rows
SELECT tenant, cause, cause_tenant, inferred, tokens, if(prompt_tokens = 0, NULL, tokens / prompt_tokens) AS share_ratio
FROM
(
    SELECT tenant, cause, cause_tenant, inferred, sum(c.tokens) AS tokens, sum(tokens) OVER () AS prompt_tokens
    FROM cause_1m AS c
    WHERE window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}
    GROUP BY tenant, cause, cause_tenant, inferred
)
WHERE cause != 'hit'
ORDER BY tokens DESC, tenant, cause, cause_tenant
LIMIT {limit:UInt32}
