// SPDX-License-Identifier: MIT
/* Attributes of kernel nodes. Kernels run as without them: what a node has is all that is seen of it. */
#include <string.h>

#include "standin.h"

/* Those that cuda.h says a kernel node has; that others are refused so is not measured. */
static bool is_of_nodes(CUkernelNodeAttrID attribute)
{
	switch (attribute) {
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
	case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
	case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
	case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
	case CU_LAUNCH_ATTRIBUTE_PRIORITY:
	case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
	case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
	case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
	case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		return true;
	default:
		return false;
	}
}

static bool is_kernel(const struct CUgraphNode_st *node)
{
	return is_node(node) && node->type == CU_GRAPH_NODE_TYPE_KERNEL;
}

API CUresult cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)
{
	if (!is_kernel(hNode) || !is_of_nodes(attr) || !value_out)
		return CUDA_ERROR_INVALID_VALUE;
	*value_out = hNode->attributes[attr];
	return CUDA_SUCCESS;
}

API CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
	if (!is_kernel(hNode) || !is_of_nodes(attr) || !value)
		return CUDA_ERROR_INVALID_VALUE;
	hNode->attributes[attr] = *value;
	return CUDA_SUCCESS;
}

API CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
	if (!is_kernel(dst) || !is_kernel(src))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(dst->attributes, src->attributes, sizeof(dst->attributes));
	return CUDA_SUCCESS;
}
