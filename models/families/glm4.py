"""GLM-4: GLM with norms after attention and MLP."""

from sinkring.models.registry import Family

GLM4 = Family(
    name="glm4", examples="GLM-4-0414", special="partial, interleaved rotary, norms after attention and MLP", partial=True, interleaved=True
)
