/* SPDX-License-Identifier: MIT */
/*
 * The budgets of mode `exact` as arithmetic: what saving adds to a period of work, and when that is too much. No clock, no
 * lock, no driver: spending.c measures, limit.c has the limit of the snapshot buffers, leave.c acts.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* A period of work: from its first operation to the end of an epoch that the program itself waited for, or found over. */
struct mpsd_period {
	uint64_t length_ns;
	uint64_t bytes;		/* saved in it; */
	uint64_t by_leads;	/* of them, in allocations that parameters of kernels lead to */
	uint64_t waited_ns;	/* the program waited for the GPU */
	uint64_t forced_ns;	/* the proxy waited, to end an epoch early */
	uint64_t prepared_ns;	/* threads prepared operations: planned and submitted snapshots and marks */
	uint64_t relayed;	/* launches that the relay submitted meanwhile */
	uint64_t looked_ns;	/* from the program's first look at unfinished work to the end; 0: it looked at none */
	unsigned int forced;	/* epochs that were ended early */
};

/* How fast the GPU copies within its memory, in bytes per microsecond, by its attributes. 0: unknown. */
uint64_t mpsd_budget_speed(int memory_clock_khz, int bus_bits);

/* The part of the period's length that saving added, in ns; without the copies where `speed` is 0. */
uint64_t mpsd_budget_added(const struct mpsd_period *period, uint64_t speed);

/* Whether copies took at most four fifths of what the budget allows for so long a time; without a budget 10 % are allowed. */
bool mpsd_budget_is_little(uint64_t copies_ns, uint64_t length_ns, uint64_t thousandths);

/* Periods since the debt was last 0. */
struct mpsd_debt {
	uint64_t debt_ns;
	uint64_t added_ns, rest_ns;	/* that saving added, and the rest of these periods */
	uint64_t bytes, by_leads;
};

/* A period ends in which saving added so much, with a budget in thousandths of the rest (0: none). True: the debt is too large. */
bool mpsd_budget_charge(struct mpsd_debt *debt, const struct mpsd_period *period, uint64_t added_ns, uint64_t thousandths);

/* An epoch has an operation whose snapshot does not fit under the limit. True: that is too often. */
struct mpsd_misses {
	unsigned int count;
	uint64_t since_ns;	/* the next one is forgotten a while after that */
};
bool mpsd_budget_miss(struct mpsd_misses *misses, uint64_t now);

/* Nearly all of it lies in such allocations. */
bool mpsd_budget_is_by_leads(uint64_t bytes, uint64_t by_leads);
