-- Hit ratio of one tenant against capacity on each instance, with the requests that the router sent there.
-- :tenant  whose curves
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :weight = blocks  blocks, tokens or cost (seconds of prefill)
SELECT model, block_size, instance, capacity_blocks, hits, asked, hit_ratio
FROM mrc_placed(tenant = {tenant:String}, from = {from:DateTime('UTC')}, to = {to:DateTime('UTC')}, weight = {weight:String})
ORDER BY model, block_size, instance, capacity_blocks
