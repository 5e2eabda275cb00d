// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Puts the parts together and takes them apart. */
#include "gpu.h"

static int nothing_to_open(void)
{
	return 0;
}

static const struct {
	int (*open)(void);
	void (*close)(void);
} parts[] = {
	{ gpu_memory_open, gpu_memory_close },
	{ gpu_control_open, gpu_control_close },
	{ gpu_failing_open, gpu_failing_close },
	{ gpu_faults_open, gpu_faults_close },
	{ nothing_to_open, gpu_accesses_close },
	{ gpu_channels_open, gpu_channels_close },
};

static void close_last(int count)
{
	while (count--)
		parts[count].close();
}

/* A part that could not be opened has nothing that its close does not bear. */
int mpsd_gpu_open(void)
{
	int part, error;

	for (part = 0; part < ARRAY_SIZE(parts); part++) {
		error = parts[part].open();
		if (error) {
			close_last(part);
			return error;
		}
	}
	return 0;
}

void mpsd_gpu_close(void)
{
	close_last(ARRAY_SIZE(parts));
}
