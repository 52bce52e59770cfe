-- Hit ratio of one tenant against cache capacity, exact at every capacity listed (the miss-ratio curve).
-- :tenant  whose curve
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :weight = blocks  blocks, tokens or cost (seconds of prefill)
SELECT model, block_size, capacity_blocks, hits, asked, hit_ratio
FROM mrc(tenant = {tenant:String}, from = {from:DateTime('UTC')}, to = {to:DateTime('UTC')}, weight = {weight:String})
ORDER BY model, block_size, capacity_blocks
