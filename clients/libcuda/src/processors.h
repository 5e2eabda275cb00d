/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>

/*
 * Whether the process may have two processors at once: by its affinity, and by what the control groups that it is in allow
 * it (cpu.max; of version 1 cpu.cfs_quota_us). `groups`: /proc/self/cgroup; `root`: where the file systems of control groups are.
 */
bool mpsd_processors_are_several(const char *groups, const char *root);
