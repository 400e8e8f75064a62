"""What `gpu_check` and `tpu_check` share: items that check and measure, the processes that do them, and the report.

The scripts run in a checkout, installed or not. Importing this package puts the checkout first in the module search
path, where the package `jpaged` and the oracle of its tests are found.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
