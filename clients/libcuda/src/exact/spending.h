/* SPDX-License-Identifier: MIT */
/* What mode `exact` costs the program, measured: bytes saved, waits for the GPU, lengths of epochs (budget.h). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* With the lock: the first operation of an epoch; its end; a move, after which the measurement begins anew. */
void mpsd_spending_begin(void);
void mpsd_spending_end(uint64_t operations);

/* The same where a callback ends the epoch. A thread may be in a wait of which nothing is counted yet: the period goes on. */
void mpsd_spending_end_before_callback(uint64_t operations);
void mpsd_spending_moved(void);

/* With the lock: whether copies took little of the period so far, and less than the budget. */
bool mpsd_spending_is_little(void);

/* With the lock: copies were given to the GPU. */
void mpsd_spending_saved(uint64_t bytes, uint64_t by_leads);

/* By any thread: it waited for the GPU; it looked, and the GPU was not known to be done. */
void mpsd_spending_waited(uint64_t ns);
void mpsd_spending_looked(void);

/* By any thread: what the proxy did for an operation took so long, without waits. The relay submitted a launch. */
void mpsd_spending_prepared(uint64_t ns);
void mpsd_spending_relayed(void);

/* By this thread: it allocated a snapshot buffer, which is seldom. What is to be subtracted from the above, as it grows. */
void mpsd_spending_excuse(uint64_t ns);
uint64_t mpsd_spending_apart_ns(void);

/* Without the lock: the GPU whose context is current is the one that copies. */
void mpsd_spending_of_device(void);

/* In thousandths of the rest of an epoch; 0: none. `is_told`: the daemon hears what it costs. */
void mpsd_spending_budget(uint64_t thousandths, bool is_told);

/* Takes the lock. False: nothing is to be told yet. */
struct mpsd_cost {
	uint64_t bytes_each, added_ns, rest_ns;
};
bool mpsd_spending_take(struct mpsd_cost *cost);
