// mxfp8_moe._inspect: what the compiled library holds and what this machine can run of it. Never on the op path.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

extern "C" {
#include "mxfp8.h"
}

static std::vector<std::pair<std::string, std::string>> backends() {
    int count;
    const struct mx_backend *const *table = mx_backends(&count);
    std::vector<std::pair<std::string, std::string>> result;
    for (int i = 0; i < count; i++) {
        mx_error why_not = {};
        table[i]->available(0, &why_not);
        result.emplace_back(table[i]->name, why_not.text);
    }
    return result;
}

PYBIND11_MODULE(_inspect, module) {
    module.doc() = "Inspection of the compiled library.";
    module.def("backends", backends,
               "Backends of this build, best first: (name, why this machine cannot run it, or an empty text).");
    module.attr("compiler") = __VERSION__;
}
