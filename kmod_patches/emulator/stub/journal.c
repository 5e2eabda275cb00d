// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * /proc/mpsd-stub: one line for each function that nvidia-uvm has called, "NAME ANSWERED REFUSED",
 * both counted since the module was loaded.
 */
#include <linux/atomic.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "stub.h"

#define JOURNAL "mpsd-stub"

static const char *const names[] = {
#define CALL(function) #function,
	MPSD_STUB_EVERY_CALL
#undef CALL
};

static atomic_t answered[MPSD_STUB_CALLS];
static atomic_t refused[MPSD_STUB_CALLS];

void mpsd_stub_answered(enum mpsd_stub_call call)
{
	atomic_inc(&answered[call]);
}

unsigned int mpsd_stub_refused(enum mpsd_stub_call call)
{
	atomic_inc(&refused[call]);
	return MPSD_STUB_NOT_SUPPORTED;
}

static int show(struct seq_file *file, void *unused)
{
	unsigned int call;

	for (call = 0; call < MPSD_STUB_CALLS; call++) {
		int yes = atomic_read(&answered[call]), no = atomic_read(&refused[call]);

		if (yes || no)
			seq_printf(file, "%s %d %d\n", names[call], yes, no);
	}
	return 0;
}

int mpsd_stub_journal_open(void)
{
	return proc_create_single(JOURNAL, 0444, NULL, show) ? 0 : -ENOMEM;
}

void mpsd_stub_journal_close(void)
{
	remove_proc_entry(JOURNAL, NULL);
}
