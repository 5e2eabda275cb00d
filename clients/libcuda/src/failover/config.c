// SPDX-License-Identifier: MIT
/* Calls with handles inside launch configurations. */
#include "failover/made.h"

#define MOST_ATTRIBUTES 32

void mpsd_attribute_native(CUlaunchAttribute *attribute)
{
	if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
		attribute->value.programmaticEvent.event = mpsd_native(attribute->value.programmaticEvent.event);
	else if (attribute->id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
		attribute->value.launchCompletionEvent.event =
			mpsd_native(attribute->value.launchCompletionEvent.event);
}

struct own_config {
	CUlaunchConfig config;
	CUlaunchAttribute attributes[MOST_ATTRIBUTES];
};

/* The configuration with handles of the copy in use, in `own`; as it is where there is nothing to translate. */
static const CUlaunchConfig *in_copy(const CUlaunchConfig *config, struct own_config *own)
{
	if (!config || !mpsd_tables()->moves || config->numAttrs > MOST_ATTRIBUTES)
		return config;
	own->config = *config;
	own->config.hStream = mpsd_native(config->hStream);
	for (unsigned int i = 0; i < config->numAttrs; i++) {
		own->attributes[i] = config->attrs[i];
		mpsd_attribute_native(&own->attributes[i]);
	}
	own->config.attrs = own->attributes;
	return &own->config;
}

CUresult make_cuOccupancyMaxActiveClusters(int *numClusters, CUfunction func, const CUlaunchConfig *config)
{
	struct own_config own;

	return inner_cuOccupancyMaxActiveClusters(numClusters, mpsd_native(func), in_copy(config, &own));
}

CUresult make_cuOccupancyMaxPotentialClusterSize(int *clusterSize, CUfunction func, const CUlaunchConfig *config)
{
	struct own_config own;

	return inner_cuOccupancyMaxPotentialClusterSize(clusterSize, mpsd_native(func), in_copy(config, &own));
}

CUresult make_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	struct own_config own;

	return inner_cuLaunchKernelEx(in_copy(config, &own), mpsd_native(f), kernelParams, extra);
}
