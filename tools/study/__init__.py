"""Study behind `edge-fl methods recommend`: tuned methods on five datasets, three partitions each, with several sizes of federation."""
