// SPDX-License-Identifier: MIT
/*
 * Measure periods. A period ends when the program waited for the GPU or found it done. An epoch that the proxy ends early,
 * because the snapshot buffers are full, does not end the period.
 */
#include <stdbool.h>

#include "exact/spending.h"

#include "clock.h"
#include "exact/budget.h"
#include "exact/leave.h"
#include "exact/readers.h"
#include "exact/state.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "stats.h"

#define LONG_NS 1000000000ull	/* a period ends after that at a forced end, too: some programs never wait */
#define TELL_NS 1000000000ull	/* between two that the daemon is told */
#define OF_BEFORE 7		/* of eight parts */
#define MOST_PREPARED_NS 5000000ull	/* for one operation */

/* The present period, with the lock. */
static uint64_t began_ns;	/* 0: nothing of it, or it is not measured */
static struct mpsd_period period;
static atomic_uint_least64_t waited_ns, forced_ns, looked_at_ns, prepared_ns, relayed;

static bool has_callbacks;	/* ended an epoch in this period */

static struct mpsd_debt debt;
static atomic_uint_least64_t budget, speed;

/* For the daemon, with the lock. */
static struct mpsd_cost cost;
static uint64_t told_ns;
static atomic_bool is_told, is_due;

static void begin_anew(void)
{
	began_ns = 0;
	period = (struct mpsd_period){ 0 };
	has_callbacks = false;
	atomic_store(&waited_ns, 0);
	atomic_store(&forced_ns, 0);
	atomic_store(&looked_at_ns, 0);
	atomic_store(&prepared_ns, 0);
	atomic_store(&relayed, 0);
}

void mpsd_spending_begin(void)
{
	if (!began_ns)
		began_ns = mpsd_now_ns();
}

void mpsd_spending_moved(void)
{
	begin_anew();
}

void mpsd_spending_saved(uint64_t bytes, uint64_t by_leads)
{
	period.bytes += bytes;
	period.by_leads += by_leads;
}

/* Each new epoch saves the same memory again, so an epoch whose copies took much goes on. */
bool mpsd_spending_is_little(void)
{
	uint64_t thousandths = atomic_load(&budget), per_us = atomic_load(&speed);

	if (!began_ns || !per_us)
		return true;
	return mpsd_budget_is_little(period.bytes * 1000 / per_us, mpsd_now_ns() - began_ns, thousandths);
}

void mpsd_spending_waited(uint64_t ns)
{
	atomic_fetch_add(mpsd_thread.is_forced ? &forced_ns : &waited_ns, ns);
}

void mpsd_spending_prepared(uint64_t ns)
{
	/* Beyond that another process had the processor. */
	atomic_fetch_add(&prepared_ns, ns < MOST_PREPARED_NS ? ns : MOST_PREPARED_NS);
}

void mpsd_spending_relayed(void)
{
	atomic_fetch_add_explicit(&relayed, 1, memory_order_relaxed);
}

static _Thread_local uint64_t excused_ns;

void mpsd_spending_excuse(uint64_t ns)
{
	excused_ns += ns;
}

uint64_t mpsd_spending_apart_ns(void)
{
	return atomic_load(&forced_ns) + excused_ns;
}

void mpsd_spending_looked(void)
{
	uint64_t not_yet = 0;

	if (!atomic_load_explicit(&looked_at_ns, memory_order_relaxed))
		atomic_compare_exchange_strong(&looked_at_ns, &not_yet, mpsd_now_ns());
}

void mpsd_spending_of_device(void)
{
	int clock = 0, bus = 0;
	CUdevice device;

	if (atomic_load(&speed) || real_cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return;
	if (real_cuDeviceGetAttribute(&clock, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device) != CUDA_SUCCESS ||
	    real_cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device) != CUDA_SUCCESS)
		return;
	atomic_store(&speed, mpsd_budget_speed(clock, bus));
}

void mpsd_spending_budget(uint64_t thousandths, bool is)
{
	atomic_store(&budget, thousandths);
	atomic_store(&is_told, is);
}

static void note(uint64_t added_ns, uint64_t now)
{
	uint64_t rest_ns = period.length_ns - added_ns;

	if (mpsd_stats->saved_periods)
		cost.bytes_each = (cost.bytes_each * OF_BEFORE + period.bytes) / (OF_BEFORE + 1);
	else
		cost.bytes_each = period.bytes;
	cost.added_ns += added_ns;
	cost.rest_ns += rest_ns;
	mpsd_stats->saved_periods++;
	mpsd_stats->saved_bytes += period.bytes;
	mpsd_stats->saved_added_ns += added_ns;
	mpsd_stats->saved_rest_ns += rest_ns;
	/* Without the time of the copies the figures would be too low. */
	if (!atomic_load(&is_told) || now - told_ns < TELL_NS || (mpsd_stats->saved_bytes && !atomic_load(&speed)))
		return;
	told_ns = now;
	atomic_store(&is_due, true);
	mpsd_line_wake();
}

static void judge(uint64_t added_ns)
{
	uint64_t thousandths = atomic_load(&budget);

	if (mpsd_budget_charge(&debt, &period, added_ns, thousandths))
		mpsd_leave(&(struct mpsd_leaving){
			.budget = MPSD_FAILOVER_BUDGET_TIME,
			.values = { debt.added_ns, debt.rest_ns, thousandths },
			.may_come_back = !mpsd_readers_any && mpsd_budget_is_by_leads(debt.bytes, debt.by_leads),
		});
}

void mpsd_spending_end(uint64_t operations)
{
	uint64_t now, looked_at = atomic_load(&looked_at_ns), added_ns;
	bool is_forced = mpsd_thread.is_forced;

	/* Captured work does not run, so an epoch with a capture says nothing about cost. */
	if (!began_ns || (!operations && !period.forced) || mpsd_capturing()) {
		begin_anew();
		return;
	}
	now = mpsd_now_ns();
	period.forced += is_forced && operations;
	period.length_ns = now - began_ns;
	if (is_forced && period.length_ns < LONG_NS)
		return;
	period.waited_ns = atomic_load(&waited_ns);
	period.forced_ns = atomic_load(&forced_ns);
	period.prepared_ns = atomic_load(&prepared_ns);
	period.relayed = atomic_load(&relayed);
	period.looked_ns = looked_at && looked_at < now ? now - looked_at : 0;
	/* A program that waits by callbacks alone may have waited all the time. */
	if (has_callbacks)
		period.looked_ns = period.length_ns;
	added_ns = mpsd_budget_added(&period, atomic_load(&speed));
	note(added_ns, now);
	judge(added_ns);
	begin_anew();
}

void mpsd_spending_end_before_callback(uint64_t operations)
{
	has_callbacks = true;
	if (began_ns && mpsd_now_ns() - began_ns >= LONG_NS)
		mpsd_spending_end(operations);
}

bool mpsd_spending_take(struct mpsd_cost *taken)
{
	if (!atomic_exchange(&is_due, false))
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	*taken = cost;
	cost.added_ns = cost.rest_ns = 0;
	mpsd_word_give(&mpsd_exact_lock);
	return true;
}
