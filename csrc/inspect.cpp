// mxfp8_moe._inspect: what the compiled library holds and what this machine can run of it. Never on the op path.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

extern "C" {
#include "mxfp8.h"
}

namespace py = pybind11;

static std::vector<const mx_backend *> backends() {
    int count;
    const struct mx_backend *const *table = mx_backends(&count);
    return {table, table + count};
}

static std::string why_not(const mx_backend &backend, int32_t device) {
    mx_error why_not = {};
    backend.available(device, &why_not);
    return why_not.text;
}

static std::vector<std::string> kernels(const mx_backend &backend) {
    std::vector<std::string> names;
    for (int32_t i = 0; i < backend.kernel_count; i++)
        names.emplace_back(backend.kernels[i].name);
    return names;
}

PYBIND11_MODULE(_inspect, module) {
    module.doc() = "Inspection of the compiled library.";
    py::class_<mx_backend>(module, "Backend", "A way to run the ops.")
        .def_readonly("name", &mx_backend::name)
        .def_property_readonly(
            "on_gpu", [](const mx_backend &backend) { return backend.place == MX_ON_GPU; },
            "Whether its tensors are a GPU's.")
        .def_property_readonly("kernels", kernels, "Names of the kernels that it launches; none on the CPU.")
        .def("why_not", why_not, py::arg("device") = 0,
             "Why this machine, or this device of it, cannot run it; an empty text if it can.");
    module.def("backends", backends, py::return_value_policy::reference, "Backends of this build, best first.");
    module.attr("compiler") = __VERSION__;
}
