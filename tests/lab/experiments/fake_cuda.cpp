// A CUDA device that does nothing, for fake tensors where torch was built without CUDA: its autograd asks the device of a
// tensor for streams and events, and finds no guard. Preloaded (LD_PRELOAD), so that torch calls this getAccelerator.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device; using Stream = c10::Stream;
  static Device here() { return {c10::DeviceType::CUDA, 0}; }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, here()); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, here()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
namespace at::accelerator { std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; } }
