// SPDX-License-Identifier: MIT
#include "exact/budget.h"

/*
 * Debt at which a program leaves. A warm-up saves once what later epochs do not, some GiB at worst: that is a few ms of
 * copies, and passes. A program that is slowed several times its length owes that much after a few epochs.
 */
#define MOST_DEBT_NS 100000000ull

/*
 * Cost of ending an epoch early if the GPU is the slower side: the GPU is idle from the end of its work until the next launch
 * reaches it.
 */
#define BUBBLE_NS 20000ull

/*
 * Epochs whose snapshot does not fit under the limit, each forgotten after a while. A large memset at a program's start is one;
 * a program that has one in each step has too many soon.
 */
#define MOST_MISSES 3
#define MISS_NS 60000000000ull

/* What the program saves where the relay submits a launch for it: most of what the driver takes for one. */
#define RELAYED_NS 2500ull

/*
 * A wait for an idle GPU takes some microseconds, for the mark alone, and one for a last small kernel a little more. Waits
 * shorter than this, and than this part of the period, do not show that the GPU was behind.
 */
#define SHORT_NS 50000ull
#define SHORT_PART 20

#define NEARLY_ALL 90	/* % */

#define WITHOUT_BUDGET 100	/* thousandths */

/*
 * The clock counts both edges of a transfer once, so twice the clock times the width is the peak. Copies reach about 80 % of
 * it, and each byte is read and written: clock [kHz] * 1000 * 2 * width / 8 * 0.8 / 2 / 1000000.
 */
uint64_t mpsd_budget_speed(int memory_clock_khz, int bus_bits)
{
	if (memory_clock_khz <= 0 || bus_bits <= 0)
		return 0;
	return (uint64_t)memory_clock_khz * (uint64_t)bus_bits / 10000;
}

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/*
 * If the program waited for the GPU, the GPU was the slower side, and copies delayed it by their own time at most; a forced
 * wait and the preparation of operations took only what the program would have waited later. If it never waited, the GPU's idle
 * time hid the copies; a forced wait and the preparation delayed the program by all of themselves, less what the relay took off
 * it. If it only looked, either may be so: the copies count. Without the GPU's speed nothing is known of preparation.
 */
uint64_t mpsd_budget_added(const struct mpsd_period *period, uint64_t speed)
{
	uint64_t copies = speed ? period->bytes * 1000 / speed : 0, waited = period->waited_ns, added;
	uint64_t prepared = speed ? period->prepared_ns : 0, relayed = period->relayed * RELAYED_NS;
	uint64_t little = period->length_ns / SHORT_PART;

	if (little < SHORT_NS)
		little = SHORT_NS;
	if (waited < little && period->looked_ns > waited)
		waited = period->looked_ns;
	if (waited < little)
		added = least(copies, waited) + period->forced_ns + prepared - least(prepared, relayed);
	else
		added = least(copies, waited + period->forced_ns) + period->forced * BUBBLE_NS;
	return least(added, period->length_ns);
}

bool mpsd_budget_is_little(uint64_t copies_ns, uint64_t length_ns, uint64_t thousandths)
{
	return copies_ns * 5000 <= length_ns * 4 * (thousandths ? thousandths : WITHOUT_BUDGET);
}

bool mpsd_budget_charge(struct mpsd_debt *debt, const struct mpsd_period *period, uint64_t added_ns, uint64_t thousandths)
{
	uint64_t rest_ns = period->length_ns - added_ns, owed_ns = debt->debt_ns + added_ns;
	uint64_t allowed_ns = rest_ns * thousandths / 1000;

	if (!thousandths || owed_ns <= allowed_ns) {
		*debt = (struct mpsd_debt){ 0 };
		return false;
	}
	debt->debt_ns = owed_ns - allowed_ns;
	debt->added_ns += added_ns;
	debt->rest_ns += rest_ns;
	debt->bytes += period->bytes;
	debt->by_leads += period->by_leads;
	return debt->debt_ns > MOST_DEBT_NS;
}

bool mpsd_budget_miss(struct mpsd_misses *misses, uint64_t now)
{
	uint64_t forgotten = (now - misses->since_ns) / MISS_NS;

	misses->count = misses->count > forgotten ? misses->count - (unsigned int)forgotten : 0;
	misses->since_ns = misses->count ? misses->since_ns + forgotten * MISS_NS : now;
	return ++misses->count > MOST_MISSES;
}

bool mpsd_budget_is_by_leads(uint64_t bytes, uint64_t by_leads)
{
	return bytes && by_leads >= bytes / 100 * NEARLY_ALL;
}
