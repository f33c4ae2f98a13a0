// Runs an AOTInductor package of a model with WTConv layers, without Python:
//
//     aoti_runner PACKAGE INPUTS OUTPUTS [LIBRARY]
//
// INPUTS is a list of images saved by torch.save; OUTPUTS receives a tuple for torch.load.
// LIBRARY is libwtconv_ops.so; a package made from a decomposed program needs none.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path);
}

// Defines the operators, whose schemas and kernels are all in the library.
void load_operators(const char* library) {
  if (!dlopen(library, RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
}

void run(const std::string& package, const std::string& inputs, const std::string& outputs) {
  torch::inductor::AOTIModelPackageLoader model(package);
  const c10::IValue loaded = torch::jit::pickle_load(read_file(inputs));
  std::vector<c10::IValue> results;
  for (const c10::IValue& image : loaded.toListRef()) {
    std::vector<at::Tensor> images{image.toTensor()};  // [B, C, H, W]
    const at::Tensor result = model.run(images).at(0);
    results.emplace_back(result);
  }
  write_file(outputs, torch::jit::pickle_save(c10::ivalue::Tuple::create(results)));
}

// One sentence for an error; libtorch's own texts end in a backtrace.
std::string sentence(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  if (text.find("Could not find schema for wtconv::") != std::string::npos) {
    return "the package calls operators of wtconv_ops, and their library is not loaded; dlopen "
           "libwtconv_ops.so before the package: give its path as the last argument";
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    std::cerr << "usage: aoti_runner PACKAGE INPUTS OUTPUTS [LIBRARY]\n";
    return 2;
  }
  try {
    if (argc == 5) load_operators(argv[4]);
    run(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << "aoti_runner: " << sentence(error) << '\n';
    return 1;
  }
  return 0;
}
