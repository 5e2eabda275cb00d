// SPDX-License-Identifier: MIT
/* Fills the tables, once, before the program can call. */
#include <stdio.h>

#include "elfview.h"
#include "failover/carry.h"
#include "proxy.h"
#include "stats.h"

/* What a stub leads to where there is no driver, and where the driver has no such function. */
static CUresult no_driver(void)
{
	return CUDA_ERROR_NO_DEVICE;
}

static CUresult no_function(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

/* Whole from the start: a constructor of the program's may call before this library's own has run. */
void *mpsd_table[MPSD_SLOTS] = { [0 ... MPSD_SLOTS - 1] = (void *)no_driver };
void *mpsd_real[MPSD_SLOTS];
static MPSD_READ_OFTEN struct mpsd_tables first = { mpsd_real, mpsd_inner, 0 };
MPSD_READ_OFTEN _Atomic(const struct mpsd_tables *) mpsd_tables_now = &first;
_Thread_local struct mpsd_thread mpsd_thread;
void *mpsd_real_handle;

static void read_real(const struct elfview *driver)
{
	for (unsigned int i = 0; i < MPSD_NAMES; i++)
		mpsd_real[i] = mpsd_elfview_address(driver, mpsd_names[i]);
}

/* Wrapped functions go first into the map: an address that two names share must lead to the wrapper. */
static void fill_map(void)
{
	for (unsigned int i = 0; i < MPSD_WRAPPERS; i++)
		if (mpsd_real[mpsd_wrappers[i].index])
			mpsd_map_add(mpsd_real[mpsd_wrappers[i].index], mpsd_wrappers[i].index);
	for (unsigned int i = 0; i < MPSD_SLOTS; i++)
		if (mpsd_real[i])
			mpsd_map_add(mpsd_real[i], i);
}

static void fill_table(void)
{
	for (unsigned int i = 0; i < MPSD_SLOTS; i++)
		mpsd_table[i] = mpsd_real[i] ? mpsd_real[i] : (void *)no_function;
	mpsd_install(MPSD_WHEN_ALWAYS);
}

void mpsd_install(enum mpsd_when when)
{
	for (unsigned int i = 0; i < MPSD_WRAPPERS; i++) {
		unsigned int index = mpsd_wrappers[i].index;

		if (mpsd_wrappers[i].when == when && mpsd_real[index])
			__atomic_store_n(&mpsd_table[index], mpsd_wrappers[i].function, __ATOMIC_RELEASE);
	}
}

__attribute__((constructor(101))) static void load(void)
{
	bool was_there = false;
	struct elfview driver;
	void *handle;

	mpsd_stats_start();
	handle = mpsd_find_real(mpsd_stats->real_path, sizeof(mpsd_stats->real_path), &was_there);
	if (!handle || !mpsd_elfview_of_handle(handle, &driver)) {
		mpsd_stats->state = MPSD_NO_DRIVER;
		mpsd_say("no CUDA driver found (only mpsd's libcuda.so.1): the program finds no device");
		return;
	}
	mpsd_real_handle = handle;
	read_real(&driver);
	mpsd_match_exports(&driver);
	mpsd_aside_prepare(&driver);
	fill_map();
	fill_table();
	mpsd_stats->state = MPSD_ACTIVE;
	if (was_there)
		mpsd_step_aside("the program opened the driver by its path before");
}
